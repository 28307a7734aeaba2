// The place where something small is added to the products of experts: LoRA, y += B (A x) on gate, up and down.
//
//   gate, up  = products of the input rows     + add(kGate), add(kUp)   before biases and activation
//   down      = product of the activated rows  + add(kDown)             before bias and the weighted sum
//
// An adapter reads each row once, before it is quantised, and keeps a few numbers of it (A x): read(). The
// sums of an item, a slice of columns of all rows of a group, are then given to it with what it kept: add().
// So A is applied once to a row, however many items the columns are cut into.
#pragma once
#include "nn/experts.h"

namespace kt::inline nn {

// Called by the workers of a forward, several at once, and never under a lock: hooks are const, and noexcept
// like kernels. For one group, all read() of the tokens end before the first add() to gate and up begins, and
// all read() of activated rows before the first add() to down.
// Results are the same bits for any number of threads as long as what is kept of a row depends on that row
// alone and what is added at (row, column) on what was kept of the row alone: how rows and columns are cut
// depends on the number of threads.
class ExpertAdapter {
 public:
  static constexpr int kReadRows = 32, kReadApart = 256;

  enum class Input : uint8_t {
    kTokens,     // what gate and up read: rows of ForwardArgs::input
    kActivated,  // what down reads: f(gate, up)
  };

  // Rows of a group as they are before quantising. Of activated rows each NUMA node has the columns
  // [column, column + columns) of `inter`, calls for these alone, and its sums are added to those of the
  // other nodes: what add() adds to down must be linear in what read() is given. Tokens come whole, on every
  // node.
  struct Rows {
    Input input = Input::kTokens;
    int expert = 0, count = 0;
    int first = 0, m = 0;  // of the group: where these begin, and all
    int column = 0, columns = 0;
    const int32_t* tokens = nullptr;  // [count]: which rows of ForwardArgs::input these are or come from
    const void* source = nullptr;     // row i is source row tokens[i] for kTokens, else i
    Real type = Real::kF32;
    int64_t stride = 0;  // elements between source rows
    // Of the group, kept_floats(input) for each row and for those up to a multiple of kReadRows: to be written.
    float* kept = nullptr;
    std::byte* scratch = nullptr;  // scratch_bytes(), 64-byte aligned, this worker's
    const Acts* packed = nullptr;  // the same rows for a product in bf16, where they are packed so

    const std::byte* row(int i) const {
      const int64_t at = input == Input::kTokens ? tokens[i] : i, size = type == Real::kF32 ? 4 : 2;
      return static_cast<const std::byte*>(source) + at * stride * size;
    }
  };

  // Sums of all rows of a group at columns [column, column + columns) of the projection's output, `inter` or
  // `hidden`; column is a multiple of 16. Blocks of 16 columns are whole and in one piece, but the last one
  // may have fewer that count. Gate and up may stand in turns, block_ld being 32: up's blocks then lie between those of
  // the tile that is gate's, which comes first.
  struct Tile {
    ExpertPart part = ExpertPart::kGate;
    int expert = 0, m = 0;
    int column = 0, columns = 0;
    const int32_t* tokens = nullptr;  // [m], as of Rows
    const float* kept = nullptr;      // [m, kept_floats()] of what the projection reads
    float* sums = nullptr;            // to be added to
    int64_t ld = 0, block_ld = 0;
    std::byte* scratch = nullptr;  // as of Rows

    // The sums of row i at columns [column + 16 * block, ...): 16, or the rest of `columns`.
    float* at(int i, int block) const { return sums + i * ld + block * block_ld; }
  };

  virtual ~ExpertAdapter() = default;
  // Numbers kept of each row; 0: no read() for that input. The same in all calls of one forward.
  virtual int kept_floats(Input input) const noexcept = 0;
  // Whether reading costs so much beside the rows that it is worth items of its own, of up to kReadApart rows, that
  // others wait for; otherwise up to kReadRows are read where they are quantised.
  virtual bool reads_apart() const noexcept { return false; }
  // Memory that read() and add() ask for, whatever they are given.
  virtual size_t scratch_bytes() const noexcept { return 0; }
  virtual void read(const Rows& rows) const noexcept = 0;
  // For every tile of every part, also where nothing was kept; an adapter that has nothing to add returns.
  virtual void add(const Tile& tile) const noexcept = 0;
  // Whether it expects columns of `inter` as they are packed where these are more than the shape's (padded_parts.h). A
  // forward over such experts refuses adapters that do not.
  virtual bool knows_padding() const noexcept { return false; }
};

}  // namespace kt::inline nn
