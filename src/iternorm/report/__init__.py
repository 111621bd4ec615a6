"""What people read: pages, plots, files, and what a result was computed on."""
