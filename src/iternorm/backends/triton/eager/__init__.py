"""An eager training step without Python: recorded once from the code beside, then launched from C++."""
