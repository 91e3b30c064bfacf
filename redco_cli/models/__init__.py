"""What is trained: models behind one interface."""
