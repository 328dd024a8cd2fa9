"""Trapline: who writes LLM-systems code that you can trust?"""
