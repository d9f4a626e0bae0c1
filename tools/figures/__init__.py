"""The figures of docs/figures: a module for each, with a `draw` that returns the picture.

What is drawn is computed by the code that trains, wherever it has the numbers: schedules, meshes, plans of messages.
"""
