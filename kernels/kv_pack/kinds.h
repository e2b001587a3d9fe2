/* Kinds of CPU that loops are compiled for. */

#pragma once

enum { PLAIN = 0, AVX2 = 1, AVX512 = 2 };
/* Tests build each of them. */
#ifndef MOST_LANES
#define MOST_LANES AVX512
#endif
