"""Data for training and prediction; knows no model. Import names from the module that defines them."""
