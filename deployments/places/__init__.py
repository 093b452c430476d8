"""The places of a loaded model that points refer to: their modules, and the shapes of their values."""
