// What threads of a warp, a block or a cluster do together, but for products: barriers, shuffles, votes.
#include <utility>

#include "machine.h"

namespace violin::emulator {

SharedBarrier& Block::barrier_at(const Thread& t, std::uint32_t offset) {
  const auto at = shared_barriers.find(offset);
  if (at == shared_barriers.end()) t.fail("no barrier was made at " + std::to_string(offset));
  return at->second;
}

void Block::settle(SharedBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.count;
  for (Thread* waiter : std::exchange(b.waiters, {})) {
    waiter->waits_at = nullptr;
    cluster->wake(*waiter);
  }
}

void Block::settle(NamedBarrier& b) {
  // Without a count all threads are expected that have not ended.
  if (b.arrived == 0 || b.arrived < (b.expected > 0 ? b.expected : alive)) return;
  const bool all = b.all;
  const bool any = b.any;
  const std::vector<NamedBarrier::Waiter> waiters = std::move(b.waiters);
  b = NamedBarrier{};
  for (const auto& w : waiters) {
    if (w.result >= 0) w.thread->r[w.result] = w.wants_all ? all : any;
    ++w.thread->next;
    w.thread->waits_at = nullptr;
    cluster->wake(*w.thread);
  }
}

void Cluster::arrive_at_cluster_barrier(Thread& t) {
  if (t.in_cluster_barrier) t.fail("a thread arrives twice at the cluster's barrier");
  t.in_cluster_barrier = true;
  ++cluster_arrived_;
  cluster_phase_of_[&t] = cluster_phase_;
  settle_cluster_barrier();
}

bool Cluster::wait_at_cluster_barrier(Thread& t) {
  if (!t.in_cluster_barrier) t.fail("a thread waits at the cluster's barrier before it arrives");
  if (cluster_phase_of_[&t] != cluster_phase_) {
    t.in_cluster_barrier = false;
    return true;
  }
  cluster_waiters_.push_back(&t);
  return false;
}

void Cluster::settle_cluster_barrier() {
  int alive = 0;
  for (const Block& b : blocks_) alive += b.alive;
  if (cluster_arrived_ == 0 || cluster_arrived_ < alive) return;
  cluster_arrived_ = 0;
  ++cluster_phase_;
  const std::vector<Thread*> waiters = std::move(cluster_waiters_);
  cluster_waiters_.clear();
  for (Thread* t : waiters) {
    t->in_cluster_barrier = false;
    ++t->next;
    t->waits_at = nullptr;
    wake(*t);
  }
}

namespace {

Step nothing(Thread&, const Instruction&) {
  return Step::kNext;
}

NamedBarrier& arrive(Thread& t, const Instruction& i) {
  const std::uint32_t id = t.get<std::uint32_t>(i.slots[0]);
  if (id >= 16) t.fail("barrier " + std::to_string(id) + " of 16");
  const int expected = i.slots[1] < 0 ? 0 : t.get<std::int32_t>(i.slots[1]);
  if (expected % 32 != 0) t.fail("a barrier for " + std::to_string(expected) + " threads, not whole warps");
  NamedBarrier& b = t.block->barriers[id];
  if (b.arrived > 0 && b.expected != expected) t.fail("threads that expect different numbers of others");
  b.expected = expected;
  ++b.arrived;
  return b;
}
Step sync(Thread& t, const Instruction& i) {
  NamedBarrier& b = arrive(t, i);
  b.waiters.push_back({&t});
  t.waits_at = &i;
  t.block->settle(b);
  return Step::kWaiting;
}
Step arrive_only(Thread& t, const Instruction& i) {
  t.block->settle(arrive(t, i));
  return t.block->cluster->after_arrival();
}
// slots: id, -1, result, operand
template <bool kAll>
Step reduce(Thread& t, const Instruction& i) {
  NamedBarrier& b = arrive(t, i);
  const bool value = (t.r[i.slots[3]] != 0) != i.negated;
  b.all = b.all && value;
  b.any = b.any || value;
  b.waiters.push_back({&t, i.slots[2], kAll});
  t.waits_at = &i;
  t.block->settle(b);
  return Step::kWaiting;
}

void shuffle(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  // slots: result, value, lane, clamp and segments, predicate; number: 0 idx, 1 down, 2 up, 3 bfly
  std::array<std::uint64_t, 32> values{};
  for (std::size_t l = 0; l < 32; ++l) {
    if (lanes >> l & 1) values[l] = warp.lanes[l]->r[i.slots[1]];
  }
  for (std::uint32_t l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    Thread& t = *warp.lanes[l];
    const std::uint32_t by = t.get<std::uint32_t>(i.slots[2]) & 31;
    const std::uint32_t c = t.get<std::uint32_t>(i.slots[3]);
    const std::uint32_t clamp = c & 31;
    const std::uint32_t segment = c >> 8 & 31;
    const std::uint32_t last = (l & segment) | (clamp & ~segment);
    const std::uint32_t first = l & segment;
    std::uint32_t from = l;
    bool valid = true;
    switch (i.number) {
      case 0:
        from = first | (by & ~segment);
        valid = from <= last;
        break;
      case 1:
        from = l + by;
        valid = from <= last;
        break;
      case 2:
        from = l - by;
        valid = static_cast<std::int32_t>(from) >= static_cast<std::int32_t>(last);
        break;
      default:
        from = l ^ by;
        valid = from <= last;
        break;
    }
    if (!valid) from = l;
    if (!(lanes >> from & 1)) t.fail("a value from lane " + std::to_string(from) + ", which does not take part");
    t.r[i.slots[0]] = values[from];
    if (i.slots[4] >= 0) t.r[i.slots[4]] = valid;
  }
}

void vote(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  bool all = true, any = false;
  std::uint32_t ballot = 0;
  for (std::size_t l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    const bool value = (warp.lanes[l]->r[i.slots[1]] != 0) != i.negated;
    all = all && value;
    any = any || value;
    ballot |= static_cast<std::uint32_t>(value) << l;
  }
  for (std::size_t l = 0; l < 32; ++l) {
    if (lanes >> l & 1) warp.lanes[l]->r[i.slots[0]] = i.number == 0 ? all : i.number == 1 ? any : ballot;
  }
}

void elect(Warp& warp, std::uint32_t lanes, const Instruction& i) {
  bool chosen = false;
  for (std::size_t l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    warp.lanes[l]->r[i.slots[0]] = !chosen;
    chosen = true;
  }
}

bool decode_bar(const Statement& s, Instruction& i) {
  if (s.has("warp")) {
    make_meeting(i, [](Warp&, std::uint32_t, const Instruction&) {}, s.operands.at(0).slot);
    return true;
  }
  if (s.has("red")) {
    // result, id, predicate
    if (s.operands.size() != 3) return false;
    i.slots = {s.operands[1].slot, -1, s.operands[0].slot, s.operands[2].slot};
    i.negated = s.operands[2].negated;
    i.run = s.has("and") ? reduce<true> : s.has("or") ? reduce<false> : nullptr;
    return i.run != nullptr;
  }
  i.slots = {s.operands.at(0).slot, s.operands.size() > 1 ? s.operands[1].slot : -1};
  i.run = s.has("arrive") ? arrive_only : s.has("sync") ? sync : nullptr;
  return i.run != nullptr;
}

bool decode_cluster_barrier(const Statement& s, Instruction& i) {
  if (s.has("arrive")) {
    i.run = [](Thread& t, const Instruction&) {
      t.block->cluster->arrive_at_cluster_barrier(t);
      return Step::kNext;
    };
  } else if (s.has("wait")) {
    i.run = [](Thread& t, const Instruction&) {
      return t.block->cluster->wait_at_cluster_barrier(t) ? Step::kNext : Step::kWaiting;
    };
  }
  return i.run != nullptr;
}

// What a thread wrote to shared memory can be read by copies and products from here on.
Step fence_async(Thread& t, const Instruction&) {
  for (const auto& [offset, bytes] : t.unfenced) {
    for (std::uint32_t n = 0; n < bytes; ++n) {
      if (t.block->unfenced[offset + n] == t.id + 1) t.block->unfenced[offset + n] = 0;
    }
  }
  t.unfenced.clear();
  return Step::kNext;
}

// Barriers that a thread has made are there for copies and for other blocks from here on.
Step fence_barriers(Thread& t, const Instruction&) {
  for (auto& [offset, barrier] : t.block->shared_barriers) {
    if (barrier.maker == t.id) barrier.maker = -1;
  }
  return Step::kNext;
}

}  // namespace

bool decode_barrier(const Statement& s, Instruction& i) {
  const std::string& name = s.opcode[0];
  if (name == "bar") return decode_bar(s, i);
  if (name == "barrier" && s.has("cluster")) return decode_cluster_barrier(s, i);
  if (name == "shfl" && s.opcode.at(1) == "sync" && s.opcode.back() == "b32") {
    const std::string& how = s.opcode[2];
    i.number = how == "idx" ? 0 : how == "down" ? 1 : how == "up" ? 2 : 3;
    const Operand& to = s.operands.at(0);
    const bool pair = to.kind == Operand::Kind::kPair;
    i.slots = {pair ? to.parts[0].slot : to.slot, s.operands.at(1).slot, s.operands.at(2).slot, s.operands.at(3).slot,
               pair ? to.parts[1].slot : -1};
    make_meeting(i, shuffle, s.operands.at(4).slot);
    return true;
  }
  if (name == "vote" && s.opcode.at(1) == "sync") {
    const std::string& how = s.opcode[2];
    if (how != "all" && how != "any" && how != "ballot") return false;
    i.number = how == "all" ? 0 : how == "any" ? 1 : 2;
    i.slots = {s.operands.at(0).slot, s.operands.at(1).slot};
    i.negated = s.operands[1].negated;
    make_meeting(i, vote, s.operands.at(2).slot);
    return true;
  }
  if (name == "elect") {
    const Operand& to = s.operands.at(0);
    if (to.kind != Operand::Kind::kPair || to.parts[0].kind != Operand::Kind::kNothing) return false;
    i.slots = {to.parts[1].slot};
    make_meeting(i, elect, s.operands.at(1).slot);
    return true;
  }
  if (name == "fence" && s.has("mbarrier_init")) {
    i.run = fence_barriers;
    return true;
  }
  if (name == "fence" && s.has("proxy") && s.has("async")) {
    i.run = fence_async;
    return true;
  }
  // Kernels run one after the other here, and registers are as many as a thread likes.
  if (name == "fence" || name == "membar" || name == "griddepcontrol" || name == "setmaxnreg") {
    i.run = nothing;
    return true;
  }
  return false;
}

}  // namespace violin::emulator
