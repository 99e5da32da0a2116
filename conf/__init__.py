"""Hydra's files, ``pkg://lightning_zero.conf``; Hydra takes a folder for a package only if this file is there."""
