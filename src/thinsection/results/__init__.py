"""What reads and tends a results folder."""
