"""Export formats for training tools and datasets: one module per format, found by the entry points
`understudy.exports`.
"""
