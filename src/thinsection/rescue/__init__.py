"""Our bounded-memory code inside other people's pipelines, put in place and taken back."""
