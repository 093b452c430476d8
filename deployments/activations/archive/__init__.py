"""The archive: sealed segments in a bucket, and the manifest that lists them."""
