"""What a job would make and take, before anything is made."""
