"""HTTP to one server: retries, downloads in pages, progress, and blocking calls."""
