// Products on the tensor cores, and matrices between shared memory and registers.
//
// Fragments are those of the PTX manual: lane l of a warp has of a 16 x 8 accumulator the rows l / 4 and l / 4 + 8 and
// the columns 2 (l % 4) and the next. wgmma's warps have 16 rows each, so that a warp computes its own when it gets
// there. A product is done at once; but until it is awaited its operands in shared memory must stay as they are, and
// nobody else may touch its results: both are checked. A left side in registers is not: ptxas warns of that.
#include "machine.h"
#include "numbers.h"

namespace violin::emulator {
namespace {

using Widen = float (*)(std::uint16_t);

Thread& lane_of(Warp& warp, int lane) {
  return *warp.lanes[static_cast<std::size_t>(lane)];
}
void need_all(Warp& warp, std::uint32_t lanes) {
  if (lanes != 0xffffffffu)
    warp.lanes[static_cast<std::size_t>(__builtin_ctz(lanes))]->fail("not all lanes of the warp take part");
}

float half_of(std::uint32_t word, int which, Widen widen) {
  return widen(static_cast<std::uint16_t>(word >> 16 * which));
}

// ldmatrix .x4: lane l gives the address of row l % 8 of matrix l / 8. number: 1 where they are transposed.
void load_matrices(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  need_all(warp, lanes);
  const unsigned char* rows[4][8];
  for (int l = 0; l < 32; ++l) {
    Thread& t = lane_of(warp, l);
    const std::uint32_t address = t.get<std::uint32_t>(i.slots[0]) + static_cast<std::uint32_t>(i.slots[1]);
    rows[l / 8][l % 8] = shared_bytes(t, address, 16, false);
  }
  for (int l = 0; l < 32; ++l) {
    for (int n = 0; n < 4; ++n) {
      const int row = l / 4, column = l % 4 * 2;
      const unsigned char* low = i.number ? rows[n][column] + 2 * row : rows[n][row] + 2 * column;
      const unsigned char* high = i.number ? rows[n][column + 1] + 2 * row : low + 2;
      lane_of(warp, l).load_shared(i.list[static_cast<std::size_t>(n)], low, high);
    }
  }
}

void store_matrices(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  need_all(warp, lanes);
  std::uint16_t matrix[4][8][8];
  for (int l = 0; l < 32; ++l) {
    for (int n = 0; n < 4; ++n) {
      const auto word = lane_of(warp, l).get<std::uint32_t>(i.list[static_cast<std::size_t>(n)]);
      matrix[n][l / 4][l % 4 * 2] = static_cast<std::uint16_t>(word);
      matrix[n][l / 4][l % 4 * 2 + 1] = static_cast<std::uint16_t>(word >> 16);
    }
  }
  for (int l = 0; l < 32; ++l) {
    Thread& t = lane_of(warp, l);
    const std::uint32_t address = t.get<std::uint32_t>(i.slots[0]) + static_cast<std::uint32_t>(i.slots[1]);
    std::memcpy(shared_bytes(t, address, 16, true), matrix[l / 8][l % 8], 16);
  }
}

// A [16,16] from four registers of each lane, which are list[first ...].
void gather_a(Warp& warp, const std::vector<int>& list, std::size_t first, Widen widen, float (&a)[16][16]) {
  for (int l = 0; l < 32; ++l) {
    for (int n = 0; n < 4; ++n) {
      const auto word = lane_of(warp, l).get<std::uint32_t>(list[first + static_cast<std::size_t>(n)]);
      const int row = l / 4 + n % 2 * 8, column = l % 4 * 2 + n / 2 * 8;
      a[row][column] = half_of(word, 0, widen);
      a[row][column + 1] = half_of(word, 1, widen);
    }
  }
}

// list: d 4, a 4, b 2, c 4
template <Widen kWiden>
void multiply_small(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  need_all(warp, lanes);
  float a[16][16], b[16][8];
  gather_a(warp, i.list, 4, kWiden, a);
  for (int l = 0; l < 32; ++l) {
    for (int n = 0; n < 2; ++n) {
      const auto word = lane_of(warp, l).get<std::uint32_t>(i.list[8 + static_cast<std::size_t>(n)]);
      b[l % 4 * 2 + 8 * n][l / 4] = half_of(word, 0, kWiden);
      b[l % 4 * 2 + 8 * n + 1][l / 4] = half_of(word, 1, kWiden);
    }
  }
  for (int l = 0; l < 32; ++l) {
    Thread& t = lane_of(warp, l);
    float results[4];
    for (int n = 0; n < 4; ++n) {
      const int row = l / 4 + n / 2 * 8, column = l % 4 * 2 + n % 2;
      double sum = t.get<float>(i.list[10 + static_cast<std::size_t>(n)]);
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
      results[n] = static_cast<float>(sum);
    }
    for (int n = 0; n < 4; ++n) t.set(i.list[static_cast<std::size_t>(n)], results[n]);
  }
}

// Tiles of wgmma: rows of 128 bytes whose 16-byte pieces are swapped by exclusive or with the row's number, eight rows
// to 1024 bytes, the only form that is understood here.
struct Tile {
  Block& block;
  std::uint32_t start, rows_step;  // of eight rows

  Tile(const Thread& t, std::uint64_t descriptor)
      : block(*t.block),
        start(static_cast<std::uint32_t>(descriptor & 0x3fff) << 4),
        rows_step(static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) t.fail("a descriptor without a swizzle of 128 bytes");
    if (descriptor >> 49 & 7) t.fail("a descriptor with a base offset");
  }
  std::uint32_t address(int row, int column) const {
    const std::uint32_t at = start + static_cast<std::uint32_t>(row / 8) * rows_step +
                             static_cast<std::uint32_t>(row % 8) * 128 + static_cast<std::uint32_t>(column) * 2;
    return at ^ (at >> 7 & 7) << 4;
  }
  // Two numbers side by side.
  std::uint32_t word(const Thread& t, int row, int column) const {
    std::uint32_t value;
    std::memcpy(&value, shared_for_async(t, block, address(row, column), 4), 4);
    return value;
  }
};

// list: accumulators, then four registers of A where that is in registers.
// slots: descriptor of A or -1, descriptor of B, whether to add, whether B and A are transposed; number: columns
template <Widen kWiden>
void multiply(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  need_all(warp, lanes);
  Thread& first = lane_of(warp, 0);
  if (!warp.fenced) first.fail("a product without a fence since the last wait");
  const int columns = static_cast<int>(i.number);
  const int rows_from = first.id / 32 % 4 * 16;
  float a[16][16];
  PendingProduct pending{&i, {}};
  const auto remember = [&](const Tile& tile, int row, int column) {
    PendingProduct::Piece piece{tile.address(row, column) & ~15u, {}};
    std::memcpy(piece.bytes.data(), tile.block.shared.data() + piece.address, 16);
    pending.pieces.push_back(piece);
  };
  if (i.slots[0] >= 0) {
    const Tile tile(first, first.r[i.slots[0]]);
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 16; k += 2) {
        const std::uint32_t word = tile.word(first, rows_from + row, k);
        a[row][k] = half_of(word, 0, kWiden);
        a[row][k + 1] = half_of(word, 1, kWiden);
      }
    }
    for (int row = 0; row < 64; ++row) {  // the hardware may read them all for each warp
      remember(tile, row, 0);
      remember(tile, row, 8);
    }
  } else {
    gather_a(warp, i.list, i.list.size() - 4, kWiden, a);
  }
  const Tile tile(first, first.r[i.slots[1]]);
  float b[16][64];
  if (i.slots[4] >= 0 && first.r[i.slots[4]] != 0) first.fail("a transposed left side");
  if (first.r[i.slots[3]] != 0) {  // rows are k
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < columns; n += 2) {
        const std::uint32_t word = tile.word(first, k, n);
        b[k][n] = half_of(word, 0, kWiden);
        b[k][n + 1] = half_of(word, 1, kWiden);
        if (n % 8 == 0) remember(tile, k, n);
      }
    }
  } else {
    for (int n = 0; n < columns; ++n) {
      for (int k = 0; k < 16; k += 2) {
        const std::uint32_t word = tile.word(first, n, k);
        b[k][n] = half_of(word, 0, kWiden);
        b[k + 1][n] = half_of(word, 1, kWiden);
        if (k % 8 == 0) remember(tile, n, k);
      }
    }
  }
  float sums[16][64] = {};
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < columns; ++n) sums[row][n] += a[row][k] * b[k][n];
    }
  }
  const bool add = first.r[i.slots[2]] != 0;
  for (int l = 0; l < 32; ++l) {
    Thread& t = lane_of(warp, l);
    if ((i.slots[0] >= 0 && t.r[i.slots[0]] != first.r[i.slots[0]]) || t.r[i.slots[1]] != first.r[i.slots[1]]) {
      t.fail("lanes with different descriptors");
    }
    for (int n = 0; n < columns / 2; ++n) {
      const int slot = i.list[static_cast<std::size_t>(n)];
      const float sum = sums[l / 4 + n / 2 % 2 * 8][n / 4 * 8 + l % 4 * 2 + n % 2];
      t.set(slot, add ? t.get<float>(slot) + sum : sum);
      if (t.result_of.empty()) t.result_of.assign(t.slots.size(), 0);
      t.result_of[static_cast<std::size_t>(slot)] = t.newest_result = warp.committed + 1;
    }
  }
  warp.open.push_back(std::move(pending));
}

void fence(Warp& warp, std::uint32_t lanes, const Instruction&) {
  need_all(warp, lanes);
  warp.fenced = true;
}

void commit(Warp& warp, std::uint32_t lanes, const Instruction&) {
  need_all(warp, lanes);
  warp.groups.push_back(std::move(warp.open));
  ++warp.committed;
  warp.open.clear();
}

void await(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  need_all(warp, lanes);
  const Thread& t = lane_of(warp, 0);
  warp.fenced = false;
  while (warp.groups.size() > t.get<std::uint32_t>(i.slots[0])) {
    for (const PendingProduct& p : warp.groups.front()) {
      for (const auto& piece : p.pieces) {
        if (std::memcmp(t.block->shared.data() + piece.address, piece.bytes.data(), 16) != 0) {
          t.fail("the operands of a product, PTX line " + std::to_string(p.instruction->statement->line) +
                 ", were overwritten before it was awaited");
        }
      }
    }
    warp.groups.pop_front();
  }
}

bool decode_wgmma(const Statement& s, Instruction& i) {
  if (s.has("fence")) {
    make_meeting(i, fence, -1);
    return true;
  }
  if (s.has("commit_group")) {
    make_meeting(i, commit, -1);
    return true;
  }
  if (s.has("wait_group")) {
    i.slots[0] = s.operands.at(0).slot;
    make_meeting(i, await, -1);
    return true;
  }
  if (!s.has("mma_async") || s.opcode[s.opcode.size() - 3] != "f32") return false;
  // {d}, a, b, scale-d, 1, 1[, transposed a], transposed b
  std::string shape;
  for (const std::string& part : s.opcode) {
    if (part.starts_with("m64n")) shape = part;
  }
  const auto operand = [&](std::size_t n) -> const Operand& { return s.operands.at(n); };
  const bool registers = operand(1).kind == Operand::Kind::kVector;
  for (const Operand& part : operand(0).parts) i.list.push_back(part.slot);
  for (const Operand& part : operand(1).parts) i.list.push_back(part.slot);
  i.number = std::stoi(shape.substr(4));
  if (!shape.ends_with("k16") || operand(0).parts.size() != static_cast<std::size_t>(i.number) / 2 || i.number > 64)
    return false;
  i.slots = {registers ? -1 : operand(1).slot, operand(2).slot, operand(3).slot, operand(s.operands.size() - 1).slot,
             registers ? -1 : operand(s.operands.size() - 2).slot};
  const auto together = s.opcode.back() == "bf16" ? multiply<from_bfloat16> : multiply<from_float16>;
  make_meeting(i, together, -1);
  return true;
}

}  // namespace

bool decode_matrix(const Statement& s, Instruction& i) {
  const std::string& name = s.opcode[0];
  if (name == "wgmma") return decode_wgmma(s, i);
  if ((name == "ldmatrix" || name == "stmatrix") && s.has("x4") && s.has("m8n8")) {
    const bool is_load = name == "ldmatrix";
    const Operand& address = s.operands.at(is_load ? 1 : 0);
    for (const Operand& part : s.operands.at(is_load ? 0 : 1).parts) i.list.push_back(part.slot);
    i.slots = {address.slot, static_cast<int>(address.offset)};
    i.number = s.has("trans");
    if (!is_load && i.number) return false;
    make_meeting(i, is_load ? load_matrices : store_matrices, -1);
    return true;
  }
  if (name == "mma" && s.has("m16n8k16") && s.has("row") && s.has("col")) {
    for (const Operand& o : s.operands) {
      for (const Operand& part : o.parts) i.list.push_back(part.slot);
    }
    if (i.list.size() != 14) return false;
    make_meeting(i, s.has("bf16") ? multiply_small<from_bfloat16> : multiply_small<from_float16>, -1);
    return true;
  }
  return false;
}

}  // namespace violin::emulator
