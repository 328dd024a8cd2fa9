"""Triton kernels of draft trees and of rounds of speculation."""
