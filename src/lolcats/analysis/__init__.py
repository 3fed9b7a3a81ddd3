"""Looking into a linearized model: errors and weights; and the page that shows them."""
