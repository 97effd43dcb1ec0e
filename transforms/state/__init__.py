"""Looking into an optimizer's state, and saving, placing and coding it."""
