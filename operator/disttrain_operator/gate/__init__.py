"""Pure: does a gang fit, and where does each of its pods go. No I/O, no clock; imports the API's names alone."""
