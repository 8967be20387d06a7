"""Statistics of lists for the agent's Python, which has no `statistics` module of its own.

The text of this module is run inside the sandbox, so it imports nothing. None and NaN count as missing: left out of
sums, None in results; with too few values the result is None, no error. `key` takes the values from rows (dicts).
"""


def _present(values, key=None):
    if key is not None:
        values = [row[key] for row in values]
    return [v for v in values if v is not None and v == v]


def mean(values, key=None):
    x = _present(values, key)
    return sum(x) / len(x) if x else None


def median(values, key=None):
    return quantile(values, 0.5, key)


def quantile(values, q, key=None):
    x = sorted(_present(values, key))
    if not x:
        return None
    at = (len(x) - 1) * q
    low = int(at)
    high = min(low + 1, len(x) - 1)
    return x[low] if x[low] == x[high] else x[low] + (x[high] - x[low]) * (at - low)


def variance(values, key=None, ddof=1):
    x = _present(values, key)
    if len(x) <= ddof:
        return None
    m = sum(x) / len(x)
    return sum([(v - m) ** 2 for v in x]) / (len(x) - ddof)


def stdev(values, key=None, ddof=1):
    v = variance(values, key, ddof)
    return None if v is None else v**0.5


def pstdev(values, key=None):
    return stdev(values, key, 0)


def zscore(values, key=None):
    if key is not None:
        values = [row[key] for row in values]
    m, s = mean(values), stdev(values)
    return [(v - m) / s if s and v is not None and v == v else None for v in values]


def pct_change(before, after=None):
    if isinstance(before, (list, tuple)):
        return [None] + [pct_change(a, b) for a, b in zip(before, before[1:], strict=False)] if before else []
    if not before or after is None or before != before or after != after:
        return None
    return after / before - 1


def corr(a, b):
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None and x == x and y == y]
    if len(pairs) < 2:
        return None
    p, q = mean([x for x, _ in pairs]), mean([y for _, y in pairs])
    u, v = sum([(x - p) ** 2 for x, _ in pairs]), sum([(y - q) ** 2 for _, y in pairs])
    return sum([(x - p) * (y - q) for x, y in pairs]) / (u * v) ** 0.5 if u and v else None


z_score = zscore
