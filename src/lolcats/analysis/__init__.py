"""What a finished run's files tell, on its model card."""
