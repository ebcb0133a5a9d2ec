// How products of more than 32 rows are cut on tiles. All ways give the same bits: measuring decides.
#pragma once
#include <cstdint>

namespace c2c {

// Laid out for Python's struct module.
struct ManyRows {
  int64_t depth = 64;   // steps of 32 columns of a chunk, at most: K is cut where it is longer
  int64_t group = 1;    // strips of w that a pair of x's tiles meets in turn
  int64_t panel = 8;    // strips that share a chunk of x before the next one; whole groups
  int64_t prefetch_x = 0;  // steps by which x is announced to the first-level cache, or 0
  int64_t prefetch_w = 0;  // the same of w
  int64_t in_place = 0;  // whether w is read where it lies, if rows do not share a cache's lines
  int64_t ranges = 4;    // of outputs per thread, at most
};

}  // namespace c2c
