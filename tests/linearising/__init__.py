"""Tests of flash_lm.linearising."""
