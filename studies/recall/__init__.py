"""The recall study: associative recall (MQAR) against the bytes of the decode state."""
