"""Web pages about jobs: page data from objects (pure), and the HTTP application that serves it of any source.

It knows neither the command nor its client. `disttrain dashboard` serves runs of this machine and jobs of a cluster.
"""
