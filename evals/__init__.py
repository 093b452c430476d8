"""GSM8K over Ray Data against an OpenAI API, with Vitrine's fields where activations are collected."""
