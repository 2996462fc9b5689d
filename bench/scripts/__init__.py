"""What people write themselves."""
