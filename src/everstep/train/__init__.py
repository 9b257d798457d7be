"""What the user holds: the session, the commit protocol, the restartable function."""
