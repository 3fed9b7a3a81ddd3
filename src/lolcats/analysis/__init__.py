"""Looking into a linearized model: errors, weights, ablations, updates; and the page that shows them."""
