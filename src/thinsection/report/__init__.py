"""Pictures and pages for the user."""
