"""The Ray actors: the store writes, the reader answers queries; both only make other modules callable."""
