"""What results say: claims, verdicts, the report."""
