"""What a URL is; imports nothing, so that a command can ask before it loads its settings."""

URL_MARK = "://"


def is_url(path: str) -> bool:
    """Tells whether a slide or folder is named by a URL (s3://, gs://, az://, https://, ...)."""
    return URL_MARK in path
