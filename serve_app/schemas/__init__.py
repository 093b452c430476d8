"""What requests may hold: pydantic models of every JSON body.

No Ray and no torch: other processes parse large bodies with them.
"""
