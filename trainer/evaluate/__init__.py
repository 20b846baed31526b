"""Evaluation of a drafter: real draft and verify decoding in process, and on a real server."""
