"""Procedural scenes: images of textured shapes with boxes, masks and maps of classes, on disk as COCO and ADE20K."""

from inline_attention.data.scenes.rendering import OBJECT_KINDS, SEMANTIC_CLASSES, Scene, render_scene
from inline_attention.data.scenes.writing import ScenesPlan, leftovers, write_scenes

__all__ = ["OBJECT_KINDS", "SEMANTIC_CLASSES", "Scene", "ScenesPlan", "leftovers", "render_scene", "write_scenes"]
