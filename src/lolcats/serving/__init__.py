"""An HTTP server that speaks OpenAI's protocol, over the generation engine. Needs the extra `serve`."""
