"""Pure: (job, observed, now) -> Decision. Imports the API and plan's names alone; reads no clock, knows no network."""
