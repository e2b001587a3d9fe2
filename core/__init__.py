"""Types that every part speaks: configuration, requests, sampling parameters, ids, errors."""
