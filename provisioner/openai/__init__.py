"""What is known of an OpenAI-compatible server: conversations, server-sent events, metrics. Pure."""
