"""The file format: Arrow schemas and metadata, checksums, reading and writing one segment."""
