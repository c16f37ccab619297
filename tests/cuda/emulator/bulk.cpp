// Barriers in shared memory, and bulk copies that complete on them.
#include "bulk.h"

#include "machine.h"

namespace violin::emulator {
namespace {

Block& block_at(Thread& t, std::uint32_t address) {
  return t.block->cluster->block_of(t, address);
}
std::uint32_t offset_of(std::uint32_t address) {
  return address & 0xffffff;
}

Step make_barrier(Thread& t, const Instruction& i) {
  const std::uint32_t address = t.get<std::uint32_t>(i.slots[0]) + static_cast<std::uint32_t>(i.number);
  shared_bytes(t, address, 8, true);
  const int count = t.get<std::int32_t>(i.slots[1]);
  if (count < 1) t.fail("a barrier for " + std::to_string(count) + " threads");
  SharedBarrier b;
  b.count = b.pending = count;
  b.maker = t.id;
  Block& block = block_at(t, address);
  block.shared_barriers[offset_of(address)] = b;
  std::memset(block.written.data() + offset_of(address), kBarrier, 8);
  return Step::kNext;
}

// slots: address, bytes or -1
Step arrive(Thread& t, const Instruction& i) {
  const std::uint32_t address = t.get<std::uint32_t>(i.slots[0]) + static_cast<std::uint32_t>(i.number);
  Block& block = block_at(t, address);
  if (block.alive == 0) t.fail("an arrival at a barrier of a block that has ended");
  SharedBarrier& b = block.barrier_at(t, offset_of(address));
  if (&block != t.block && b.maker >= 0) t.fail("an arrival at a barrier that was made without a fence");
  if (i.slots[1] >= 0) b.bytes += t.get<std::uint32_t>(i.slots[1]);
  if (b.pending == 0) t.fail("more arrivals at a barrier than it expects");
  --b.pending;
  block.settle(b);
  return t.block->cluster->after_arrival();
}

// slots: predicate, address, parity. Waits until it is true: those who ask ask again anyway.
Step try_wait(Thread& t, const Instruction& i) {
  const std::uint32_t address = t.get<std::uint32_t>(i.slots[1]) + static_cast<std::uint32_t>(i.number);
  SharedBarrier& b = t.block->barrier_at(t, offset_of(address));
  const int parity = t.get<std::int32_t>(i.slots[2]);
  if (parity != 0 && parity != 1) t.fail("a parity of " + std::to_string(parity));
  if (b.phase != parity) {
    t.r[i.slots[0]] = 1;
    return Step::kNext;
  }
  b.waiters.push_back(&t);
  t.waits_at = &i;
  return Step::kWaiting;
}

Step address_in_block(Thread& t, const Instruction& i) {
  t.set(i.slots[0], Cluster::in_block(t.get<std::uint32_t>(i.slots[1]), t.get<std::int32_t>(i.slots[2])));
  return Step::kNext;
}

void write_shared(const Thread& t, Block& block, std::uint32_t offset, const unsigned char* from, std::size_t bytes) {
  if (std::memchr(block.written.data() + offset, kBarrier, bytes) != nullptr) t.fail("a bulk copy over a barrier");
  std::memcpy(block.shared.data() + offset, from, bytes);
  std::memset(block.written.data() + offset, kWritten, bytes);
  std::fill_n(block.unfenced.begin() + offset, bytes, std::uint16_t{0});
}

void complete(Thread& t, Block& block, std::uint32_t barrier, std::size_t bytes) {
  if (block.alive == 0) t.fail("a bulk copy to a block that has ended");
  --block.loads_on_their_way;
  SharedBarrier& b = block.barrier_at(t, barrier);
  if (b.maker >= 0) t.fail("a bulk copy to a barrier that was made without a fence");
  b.bytes -= static_cast<std::int64_t>(bytes);
  block.settle(b);
}

// slots: to, from, bytes, barrier
Step copy_bytes(Thread& t, const Instruction& i) {
  const std::uint32_t to = offset_of(t.get<std::uint32_t>(i.slots[0]));
  const std::uint64_t from = t.r[i.slots[1]];
  const std::size_t bytes = t.get<std::uint32_t>(i.slots[2]);
  const std::uint32_t barrier = offset_of(t.get<std::uint32_t>(i.slots[3]));
  if (to % 16 || from % 16 || bytes % 16) t.fail("a bulk copy of pieces that are no multiples of 16 bytes");
  if (to < kSharedStart || to + bytes > t.block->shared.size()) t.fail("a bulk copy past shared memory");
  if (!t.block->cluster->launch().memory->allows(from, bytes)) {
    t.fail("a bulk copy of " + std::to_string(bytes) + " bytes from outside of all tensors");
  }
  if (t.get<std::uint32_t>(i.slots[0]) >> 24 || t.get<std::uint32_t>(i.slots[3]) >> 24)
    t.fail("a bulk copy to another block");
  ++t.block->loads_on_their_way;
  t.block->cluster->later([&t, to, from, bytes, barrier] {
    write_shared(t, *t.block, to, reinterpret_cast<const unsigned char*>(from), bytes);
    complete(t, *t.block, barrier, bytes);
  });
  return Step::kNext;
}

struct Box {
  const TensorMap* map;
  std::int64_t at[4];
  std::uint32_t shared;

  // slots[0]: the map; list: coordinates.
  Box(const Thread& t, int map_slot, const std::vector<int>& list, std::uint32_t address)
      : map(reinterpret_cast<const TensorMap*>(t.r[map_slot])), shared(offset_of(address)) {
    if (map->mark != kMapMark) t.fail("an address that is none of a tensor map");
    for (std::size_t n = 0; n < 4; ++n) at[n] = t.get<std::int32_t>(list[n]);
    if (at[0] < 0) t.fail("a box that begins before its rows");
    if (shared % 128 != 0) t.fail("a box at a shared address that is no multiple of 128");
    if (map->swizzle == 128 && map->box[0] * map->element != 128)
      t.fail("rows of a swizzled box that are not 128 bytes");
    if (shared < kSharedStart || shared + bytes() > t.block->shared.size()) t.fail("a box past shared memory");
  }
  std::size_t row_bytes() const { return std::size_t{map->box[0]} * map->element; }
  std::size_t rows() const { return std::size_t{map->box[1]} * map->box[2] * map->box[3]; }
  std::size_t bytes() const { return row_bytes() * rows(); }

  // The part of row n that exists: its address and its bytes.
  std::pair<std::uint64_t, std::size_t> row(std::size_t n) const {
    const std::int64_t index[4] = {at[0], at[1] + static_cast<std::int64_t>(n % map->box[1]),
                                   at[2] + static_cast<std::int64_t>(n / map->box[1] % map->box[2]),
                                   at[3] + static_cast<std::int64_t>(n / map->box[1] / map->box[2])};
    std::uint64_t address = map->data;
    for (std::size_t d = 0; d < 4; ++d) {
      if (index[d] < 0 || index[d] >= static_cast<std::int64_t>(map->sizes[d])) return {0, 0};
      address += static_cast<std::uint64_t>(index[d]) * (d == 0 ? map->element : map->strides[d - 1]);
    }
    const std::uint64_t left = map->sizes[0] - static_cast<std::uint64_t>(index[0]);
    return {address, std::min<std::size_t>(row_bytes(), left * map->element)};
  }
  // Where byte `column` of row n lies in shared memory.
  std::uint32_t place(std::size_t n, std::size_t column) const {
    const std::uint32_t address = shared + static_cast<std::uint32_t>(n * row_bytes() + column);
    return map->swizzle == 128 ? address ^ (address >> 7 & 7) << 4 : address;
  }
};

// slots: to, map, barrier, blocks of the cluster or -1; list: coordinates
Step load_box(Thread& t, const Instruction& i) {
  const Box box(t, i.slots[1], i.list, t.get<std::uint32_t>(i.slots[0]));
  const std::uint32_t barrier = offset_of(t.get<std::uint32_t>(i.slots[2]));
  std::uint32_t blocks = i.slots[3] < 0 ? 1u << t.block->rank : t.get<std::uint16_t>(i.slots[3]);
  if (blocks >> t.block->cluster->size()) t.fail("a copy to blocks that the cluster has not");
  const Memory& memory = *t.block->cluster->launch().memory;
  for (std::size_t n = 0; n < box.rows(); ++n) {
    const auto [address, bytes] = box.row(n);
    if (bytes > 0 && !memory.allows(address, bytes)) t.fail("a box that reaches outside of all tensors");
  }
  for (int rank = 0; rank < t.block->cluster->size(); ++rank) {
    if (!(blocks >> rank & 1)) continue;
    ++t.block->cluster->block(rank).loads_on_their_way;
    t.block->cluster->later([&t, box, barrier, rank] {
      Block& block = t.block->cluster->block(rank);
      const unsigned char zeros[16] = {};
      for (std::size_t n = 0; n < box.rows(); ++n) {
        const auto [address, bytes] = box.row(n);
        for (std::size_t c = 0; c < box.row_bytes(); c += 16) {
          const std::size_t present = std::min<std::size_t>(16, c < bytes ? bytes - c : 0);
          write_shared(t, block, box.place(n, c), zeros, 16);
          if (present > 0)
            write_shared(t, block, box.place(n, c), reinterpret_cast<const unsigned char*>(address) + c, present);
        }
      }
      complete(t, block, barrier, box.bytes());
    });
  }
  return Step::kNext;
}

void wake_storer(Thread& t) {
  if (t.waits_for_stores < 0 || t.unread_stores > t.waits_for_stores) return;
  t.waits_for_stores = -1;
  ++t.next;
  t.waits_at = nullptr;
  t.block->cluster->wake(t);
}

// slots: map, from; list: coordinates
Step store_box(Thread& t, const Instruction& i) {
  const Box box(t, i.slots[0], i.list, t.get<std::uint32_t>(i.slots[1]));
  const Memory& memory = *t.block->cluster->launch().memory;
  for (std::size_t n = 0; n < box.rows(); ++n) {
    const auto [address, bytes] = box.row(n);
    if (bytes > 0 && !memory.allows(address, bytes)) t.fail("a box that reaches outside of all tensors");
    for (std::size_t c = 0; c < bytes; c += 16)
      shared_for_async(t, *t.block, box.place(n, c), std::min<std::size_t>(16, bytes - c));
  }
  ++t.open_stores;
  ++t.unread_stores;
  t.block->cluster->later([&t, box] {
    for (std::size_t n = 0; n < box.rows(); ++n) {
      const auto [address, bytes] = box.row(n);
      for (std::size_t c = 0; c < bytes; c += 16) {
        std::memcpy(reinterpret_cast<unsigned char*>(address) + c, t.block->shared.data() + box.place(n, c),
                    std::min<std::size_t>(16, bytes - c));
      }
    }
    --t.unread_stores;
    wake_storer(t);
  });
  return Step::kNext;
}

Step commit(Thread& t, const Instruction&) {
  t.open_stores = 0;
  return Step::kNext;
}
// Of as many groups as may be left only none is asked for here, so that stores are counted and not groups.
Step await_stores(Thread& t, const Instruction& i) {
  if (t.get<std::uint32_t>(i.slots[0]) != 0) t.fail("groups of stores that are left");
  if (t.unread_stores <= t.open_stores) return Step::kNext;
  t.waits_for_stores = t.open_stores;
  t.waits_at = &i;
  return Step::kWaiting;
}

bool decode_copy(const Statement& s, Instruction& i) {
  const auto operand = [&](std::size_t n) -> const Operand& { return s.operands.at(n); };
  for (const Operand& o : s.operands) {
    if (o.kind == Operand::Kind::kAddress && o.offset != 0) return false;
  }
  if (s.has("commit_group")) {
    i.run = commit;
  } else if (s.has("wait_group")) {
    i.slots[0] = operand(0).slot;
    i.run = await_stores;
  } else if (s.has("tensor") && s.has("4d")) {
    const bool is_store = s.has("bulk_group");
    const Operand& map = operand(is_store ? 0 : 1);
    for (const Operand& part : map.parts) i.list.push_back(part.slot);
    if (i.list.size() != 4) return false;
    if (is_store) {
      i.slots = {map.slot, operand(1).slot};
      i.run = store_box;
    } else {
      i.slots = {operand(0).slot, map.slot, operand(2).slot, s.has("multicast::cluster") ? operand(3).slot : -1};
      i.run = load_box;
    }
  } else if (s.opcode.at(3) == "shared::cluster" && s.opcode.at(4) == "global") {
    i.slots = {operand(0).slot, operand(1).slot, operand(2).slot, operand(3).slot};
    i.run = copy_bytes;
  }
  return i.run != nullptr;
}

bool decode_shared_barrier(const Statement& s, Instruction& i) {
  const auto operand = [&](std::size_t n) -> const Operand& { return s.operands.at(n); };
  if (s.has("init")) {
    i.slots = {operand(0).slot, operand(1).slot};
    i.number = operand(0).offset;
    i.run = make_barrier;
  } else if (s.has("arrive")) {
    if (operand(0).kind != Operand::Kind::kNothing) return false;
    if (s.operands.size() != (s.has("expect_tx") ? 3u : 2u)) return false;  // a count
    i.slots = {operand(1).slot, s.has("expect_tx") ? operand(2).slot : -1};
    i.number = operand(1).offset;
    i.run = arrive;
  } else if (s.has("try_wait") && s.has("parity")) {
    i.slots = {operand(0).slot, operand(1).slot, operand(2).slot};
    i.number = operand(1).offset;
    i.run = try_wait;
  }
  return i.run != nullptr;
}

}  // namespace

bool decode_bulk(const Statement& s, Instruction& i) {
  const std::string& name = s.opcode[0];
  if (name == "mbarrier") return decode_shared_barrier(s, i);
  if (name == "cp" && s.has("bulk")) return decode_copy(s, i);
  if (name == "mapa" && s.has("shared::cluster")) {
    i.slots = {s.operands.at(0).slot, s.operands.at(1).slot, s.operands.at(2).slot};
    i.run = address_in_block;
    return true;
  }
  return false;
}

}  // namespace violin::emulator
