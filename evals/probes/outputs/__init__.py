"""What a sweep writes: probes.json, its tables, the probe, and the page."""
