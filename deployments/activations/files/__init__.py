"""Files, directories and buckets, whatever is in them."""
