"""Naming what a picture shows."""

from inline_attention.tasks.classification.prediction import ImageClassifier, ImageResult, Prediction

__all__ = ["ImageClassifier", "ImageResult", "Prediction"]
