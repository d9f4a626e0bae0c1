"""Pure: a job and an attempt -> the objects that the attempt consists of. Imports the API alone."""
