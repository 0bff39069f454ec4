"""The server: OpenAI's HTTP interface over any runtime, metrics, and a page to try it."""
