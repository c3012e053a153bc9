"""The HTTP API, a file a noun. A route parses, calls one function and answers."""
