#include "machine.h"

#include <algorithm>

namespace violin::emulator {

void Memory::allow(std::uint64_t begin, std::size_t bytes) {
  std::uint64_t end = begin + bytes;
  // Ranges that touch become one: tensors that share memory are given more than once.
  auto at = ranges_.upper_bound(begin);
  if (at != ranges_.begin() && std::prev(at)->second >= begin) --at;
  while (at != ranges_.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = ranges_.erase(at);
  }
  ranges_[begin] = end;
  begin_ = 1, end_ = 0;
}

void Memory::forget() {
  ranges_.clear();
  begin_ = 1, end_ = 0;
}

bool Memory::allows(std::uint64_t address, std::size_t bytes) const {
  if (address >= begin_ && address < end_) return bytes <= end_ - address;
  auto at = ranges_.upper_bound(address);
  if (at == ranges_.begin()) return false;
  --at;
  begin_ = at->first, end_ = at->second;
  return address < end_ && bytes <= end_ - address;
}

void Thread::fail(const std::string& what) const {
  const Instruction& i = program->code[static_cast<std::size_t>(next)];
  throw Error(program->function->name + ", block " + std::to_string(block->index[0]) + "," +
              std::to_string(block->index[1]) + "," + std::to_string(block->index[2]) + ", thread " +
              std::to_string(id) + ", PTX line " + std::to_string(i.statement->line) + ", " + i.statement->text() +
              ": " + what);
}

void Thread::land(const FlyingLoad& load) {
  std::uint16_t halves[2];
  std::memcpy(&halves[0], load.low, 2);
  std::memcpy(&halves[1], load.high, 2);
  set(load.slot, static_cast<std::uint32_t>(halves[1]) << 16 | halves[0]);
}

void Thread::load_shared(int slot, const unsigned char* low, const unsigned char* high) {
  const FlyingLoad load{slot, low, high};
  if (block->cluster->in_order()) {
    land(load);
  } else {
    flying.push_back(load);
  }
}

void Thread::land_loads(const Instruction& i) {
  std::erase_if(flying, [&](const FlyingLoad& load) {
    const bool due = i.awaits_loads || std::find(i.touches.begin(), i.touches.end(), load.slot) != i.touches.end();
    if (due) land(load);
    return due;
  });
}

void Thread::check_results(const Instruction& i) {
  const std::uint32_t done = warp->committed - static_cast<std::uint32_t>(warp->groups.size());
  if (newest_result <= done) {
    newest_result = 0;
    return;
  }
  if (i.is_product || !frames.empty() || (i.guard >= 0 && (r[i.guard] != 0) == i.guard_negated)) return;
  const auto group_of = [&](int slot) -> std::uint32_t& { return result_of[static_cast<std::size_t>(slot)]; };
  if (i.is_move) {  // the same register to the hardware
    group_of(i.touches[0]) = group_of(i.touches[1]);
    return;
  }
  for (const int slot : i.touches) {
    if (group_of(slot) > done) fail("the result of a product that has not been awaited");
  }
}

Step Warp::meet(Thread& t, const Instruction& i, std::uint32_t mask) {
  mask &= alive;
  if (!(mask >> t.lane & 1)) t.fail("a lane that is not in its own mask");
  std::size_t at = 0;
  while (at < meetings.size() && (meetings[at].at != &i || meetings[at].expected != mask)) ++at;
  if (at == meetings.size()) meetings.push_back({&i, mask, 0});
  meetings[at].arrived |= 1u << t.lane;
  t.waits_at = &i;
  if (meetings[at].arrived == meetings[at].expected) hold(at);
  return Step::kWaiting;
}

void Warp::hold(std::size_t meeting) {
  const Meeting m = meetings[meeting];
  meetings.erase(meetings.begin() + static_cast<std::ptrdiff_t>(meeting));
  m.at->together(*this, m.arrived, *m.at);
  for (int lane = 0; lane < 32; ++lane) {
    if (!(m.arrived >> lane & 1)) continue;
    Thread& t = *lanes[static_cast<std::size_t>(lane)];
    ++t.next;
    t.waits_at = nullptr;
    block->cluster->wake(t);
  }
}

void make_meeting(Instruction& i, void (*together)(Warp&, std::uint32_t, const Instruction&), int mask_slot) {
  i.together = together;
  i.other = mask_slot;
  i.run = [](Thread& t, const Instruction& in) {
    const std::uint32_t mask = in.other < 0 ? t.warp->alive : t.get<std::uint32_t>(static_cast<int>(in.other));
    return t.warp->meet(t, in, mask);
  };
}

unsigned char* global_bytes(const Thread& t, std::uint64_t address, std::size_t bytes, bool write) {
  if (address % bytes != 0) t.fail("an address that is no multiple of " + std::to_string(bytes));
  const auto within = [&](const std::vector<unsigned char>& own) {
    const auto begin = reinterpret_cast<std::uint64_t>(own.data());
    return address >= begin && address + bytes <= begin + own.size();
  };
  if (!t.block->cluster->launch().memory->allows(address, bytes)) {
    const bool own = within(t.local) || within(t.calls) ||
                     (!t.frames.empty() && (within(t.frames.back().params) || within(t.frames.back().calls)));
    if (!own && (write || !within(t.block->cluster->launch().params))) {
      t.fail(std::string(write ? "a write" : "a read") + " outside of all tensors, " + std::to_string(bytes) +
             " bytes");
    }
  }
  return reinterpret_cast<unsigned char*>(address);
}

unsigned char* shared_bytes(Thread& t, std::uint32_t address, std::size_t bytes, bool write) {
  Block& block = t.block->cluster->block_of(t, address);
  const std::uint32_t offset = address & 0xffffff;
  if (offset % bytes != 0) t.fail("a shared address that is no multiple of " + std::to_string(bytes));
  if (offset < kSharedStart || offset + bytes > block.shared.size()) {
    t.fail(std::string(write ? "a write" : "a read") + " outside of shared memory, at " + std::to_string(offset) +
           " of " + std::to_string(block.shared.size()));
  }
  if (write) {
    if (std::memchr(block.written.data() + offset, kBarrier, bytes) != nullptr) t.fail("a write to a barrier");
    std::memset(block.written.data() + offset, kWritten, bytes);
    if (t.block->cluster->launch().program->reads_async) {
      std::fill_n(block.unfenced.begin() + offset, bytes, static_cast<std::uint16_t>(t.id + 1));
      t.unfenced.emplace_back(offset, static_cast<std::uint32_t>(bytes));
    }
  } else if (std::memchr(block.written.data() + offset, 0, bytes) != nullptr) {
    t.fail("a read of shared memory that nobody has written, at " + std::to_string(offset));
  }
  return block.shared.data() + offset;
}

const unsigned char* shared_for_async(const Thread& t, Block& block, std::uint32_t offset, std::size_t bytes) {
  if (offset < kSharedStart || offset + bytes > block.shared.size()) t.fail("a tile outside of shared memory");
  for (std::size_t i = 0; i < bytes; ++i) {
    if (!block.written[offset + i])
      t.fail("a read of shared memory that nobody has written, at " + std::to_string(offset + i));
    if (block.unfenced[offset + i]) {
      t.fail("shared memory that thread " + std::to_string(block.unfenced[offset + i] - 1) +
             " wrote without a fence for the async proxy, at " + std::to_string(offset + i));
    }
  }
  return block.shared.data() + offset;
}

Cluster::Cluster(const Launch& launch, std::array<unsigned, 3> first_block, std::mt19937_64& random, bool in_order)
    : launch_(launch), random_(random), in_order_(in_order) {
  const Function& f = *launch.program->function;
  const std::size_t count = std::size_t{launch.block.x} * launch.block.y * launch.block.z;
  const std::size_t dynamic = (kSharedStart + f.static_shared + f.shared_align - 1) / f.shared_align * f.shared_align;
  const std::size_t shared = dynamic + launch.dynamic_shared;
  blocks_.resize(static_cast<std::size_t>(f.cluster));
  for (int rank = 0; rank < f.cluster; ++rank) {
    Block& b = blocks_[static_cast<std::size_t>(rank)];
    b.cluster = this;
    b.rank = rank;
    b.alive = static_cast<int>(count);
    b.index = first_block;
    b.index[0] += static_cast<unsigned>(rank);
    b.shared.assign(shared, 0xff);
    b.written.assign(shared, 0);
    b.unfenced.assign(shared, 0);
    b.threads.resize(count);
    b.warps.resize((count + 31) / 32);
    for (std::size_t i = 0; i < count; ++i) {
      Thread& t = b.threads[i];
      t.id = static_cast<int>(i);
      t.lane = static_cast<int>(i % 32);
      t.block = &b;
      t.warp = &b.warps[i / 32];
      t.warp->block = &b;
      t.warp->lanes[i % 32] = &t;
      t.warp->alive |= 1u << (i % 32);
      t.program = launch.program;
      t.local.assign(f.local_bytes, 0xff);
      t.calls.assign(f.call_bytes, 0xff);
      t.slots.assign(static_cast<std::size_t>(f.slots), 0xffffffffffffffffull);  // numbers that are none
      t.r = t.slots.data();
      for (const auto& c : f.constants) t.r[c.slot] = c.value;
      ready_.push_back(&t);
    }
  }
  for (Block& b : blocks_) {
    for (Thread& t : b.threads) {
      for (const auto& special : f.specials) {
        const std::string& n = special.name;
        const auto offset = [&] { return std::stoull(n.substr(n.find(' ') + 1)); };
        const unsigned id = static_cast<unsigned>(t.id);
        std::uint64_t value = 0;
        if (n.starts_with("param ")) {
          value = reinterpret_cast<std::uint64_t>(launch.params.data()) + offset();
        } else if (n.starts_with("local ")) {
          value = reinterpret_cast<std::uint64_t>(t.local.data()) + offset();
        } else if (n.starts_with("call ")) {
          value = reinterpret_cast<std::uint64_t>(t.calls.data()) + offset();
        } else if (n == "%tid.x") {
          value = id % launch.block.x;
        } else if (n == "%tid.y") {
          value = id / launch.block.x % launch.block.y;
        } else if (n == "%tid.z") {
          value = id / launch.block.x / launch.block.y;
        } else if (n == "%ctaid.x") {
          value = b.index[0];
        } else if (n == "%ctaid.y") {
          value = b.index[1];
        } else if (n == "%ctaid.z") {
          value = b.index[2];
        } else if (n == "%ntid.x") {
          value = launch.block.x;
        } else if (n == "%ntid.y") {
          value = launch.block.y;
        } else if (n == "%ntid.z") {
          value = launch.block.z;
        } else if (n == "%nctaid.x") {
          value = launch.grid.x;
        } else if (n == "%nctaid.y") {
          value = launch.grid.y;
        } else if (n == "%nctaid.z") {
          value = launch.grid.z;
        } else if (n == "%cluster_ctarank") {
          value = static_cast<std::uint64_t>(b.rank);
        } else if (n == "%laneid") {
          value = static_cast<std::uint64_t>(t.lane);
        } else {
          throw Error(f.name + ": the special register " + n + " is unknown");
        }
        t.r[special.slot] = value;
      }
    }
  }
}

void Cluster::later(std::function<void()> work) {
  if (in_order_) {
    work();
  } else {
    work_.push_back(std::move(work));
  }
}

bool Cluster::is_slow(const Thread& t) const {
  const auto warps = static_cast<int>(t.block->warps.size());
  switch (slow_) {
    case Slow::kWarp:
      return t.id / 32 == slow_which_ % warps;
    case Slow::kAllButAWarp:
      return t.id / 32 != slow_which_ % warps;
    case Slow::kWarpgroup:
      return t.id / 128 == slow_which_ % ((warps + 3) / 4);
    case Slow::kLane:
      return t.lane == slow_which_ % 32;
    case Slow::kBlock:
      return t.block->rank == slow_which_ % size();
    case Slow::kNobody:
      break;
  }
  return false;
}

void Cluster::choose_slow() {
  slow_ = static_cast<Slow>(std::uniform_int_distribution<int>(0, static_cast<int>(Slow::kNobody))(random_));
  slow_which_ = std::uniform_int_distribution<int>(0, 1023)(random_);
}

void Cluster::run() {
  // How many turns of threads a copy waits for: until nobody can go on, or fewer.
  std::size_t patience = 0;
  if (!in_order_) {
    constexpr std::array<std::size_t, 3> kPatience = {0, 64, 4096};
    patience = kPatience[random_() % 3];
    choose_slow();
  }
  const auto any = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); };
  while (!ready_.empty() || !work_.empty() || !held_.empty()) {
    const bool lands = ready_.empty() ? held_.empty() || any(2) == 0 : patience > 0 && any(patience) == 0;
    if (!work_.empty() && lands) {
      std::swap(work_[any(work_.size())], work_.back());
      const std::function<void()> work = std::move(work_.back());
      work_.pop_back();
      work();
      continue;
    }
    if (ready_.empty()) {
      ready_.swap(held_);
      choose_slow();
      continue;
    }
    if (!in_order_) std::swap(ready_.front(), ready_[any(ready_.size())]);
    Thread& t = *ready_.front();
    ready_.pop_front();
    if (!in_order_ && is_slow(t)) {
      held_.push_back(&t);
      continue;
    }
    run_thread(t);
  }
  for (const Block& b : blocks_) {
    if (b.alive > 0) report_deadlock();
  }
}

void Cluster::run_thread(Thread& t) {
  while (true) {
    const Instruction& i = t.program->code[static_cast<std::size_t>(t.next)];
    if (!t.flying.empty()) t.land_loads(i);
    if (t.newest_result > 0) t.check_results(i);
    if (i.guard >= 0 && (t.r[i.guard] != 0) == i.guard_negated) {
      ++t.next;
      continue;
    }
    switch (i.run(t, i)) {
      case Step::kNext:
        ++t.next;
        break;
      case Step::kYield:
        ++t.next;
        wake(t);
        return;
      case Step::kJumped:
        break;
      case Step::kWaiting:
        return;
      case Step::kExited:
        exit(t);
        return;
    }
  }
}

void Cluster::exit(Thread& t) {
  for (const auto& group : t.copy_groups) t.copies.insert(t.copies.end(), group.begin(), group.end());
  if (!t.copies.empty()) t.fail("a thread that ends before its copies");
  if (t.unread_stores > 0) t.fail("a thread that ends before its stores have been read");
  if (!t.warp->open.empty() || !t.warp->groups.empty()) t.fail("a thread that ends before its products");
  t.exited = true;
  Block& b = *t.block;
  --b.alive;
  if (b.alive == 0 && b.loads_on_their_way > 0) t.fail("a block that ends before its bulk copies");
  if (t.in_cluster_barrier) t.fail("a thread that ends between its arrival at the cluster's barrier and its wait");
  t.warp->alive &= ~(1u << t.lane);
  for (std::size_t m = t.warp->meetings.size(); m-- > 0;) {
    Warp::Meeting& meeting = t.warp->meetings[m];
    meeting.expected &= ~(1u << t.lane);
    if (meeting.arrived == meeting.expected) t.warp->hold(m);
  }
  for (NamedBarrier& barrier : b.barriers) b.settle(barrier);
  settle_cluster_barrier();
}

void Cluster::report_deadlock() const {
  std::string where;
  int waiting = 0;
  for (const Block& b : blocks_) {
    const Instruction* last = nullptr;
    for (const Thread& t : b.threads) {
      if (t.exited) continue;
      ++waiting;
      const Instruction* at = &t.program->code[static_cast<std::size_t>(t.next)];
      if (at == last) continue;
      last = at;
      where += "; block " + std::to_string(b.index[0]) + " from thread " + std::to_string(t.id) + " on: line " +
               std::to_string(at->statement->line) + ", " + at->statement->text();
    }
  }
  throw Error(launch_.program->function->name + ": " + std::to_string(waiting) + " threads wait for ever" + where);
}

void run(const Launch& launch, const Order& order) {
  const Function& f = *launch.program->function;
  std::mt19937_64 random(order.seed);
  const unsigned cluster = static_cast<unsigned>(f.cluster);
  if (launch.grid.x % cluster != 0) throw Error(f.name + ": the grid is no multiple of a cluster");
  std::vector<std::array<unsigned, 3>> blocks;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; x += cluster) blocks.push_back({x, y, z});
    }
  }
  if (order.seed != 0) std::shuffle(blocks.begin(), blocks.end(), random);
  for (const auto& first : blocks) Cluster(launch, first, random, order.seed == 0).run();
}

namespace {

void add_slots(const Operand& o, std::vector<int>& to) {
  if (o.slot >= 0) to.push_back(o.slot);
  for (const Operand& part : o.parts) add_slots(part, to);
}

// Arithmetic goes on beside loads, and so do what warps do together without memory and arrivals at other blocks.
bool awaits_loads(const Statement& s) {
  const std::string& name = s.opcode[0];
  if (name == "bar") return !s.has("warp");
  if (name == "mbarrier") return !s.has("shared::cluster");
  for (const char* other :
       {"st", "red", "stmatrix", "cp", "fence", "membar", "barrier", "wgmma", "call", "ret", "exit"}) {
    if (name == other) return true;
  }
  return false;
}

}  // namespace

Program decode(const std::shared_ptr<const Function>& function,
               const std::function<const Program*(const std::string&)>& find) {
  Program program{function, {}, false};
  program.code.reserve(function->statements.size() + 1);
  for (const Statement& s : function->statements) {
    Instruction i;
    i.statement = &s;
    i.guard = s.guard;
    i.guard_negated = s.guard_negated;
    for (const Operand& o : s.operands) add_slots(o, i.touches);
    i.awaits_loads = awaits_loads(s);
    i.is_move = s.opcode[0] == "mov" && i.touches.size() == 2;
    i.is_product = s.has("mma_async");
    program.reads_async = program.reads_async || s.has("mma_async") || (s.opcode[0] == "cp" && s.has("bulk_group"));
    const std::string& name = s.opcode[0];
    if (name == "bra") {
      const auto label = function->labels.find(s.operands.at(0).name);
      if (label == function->labels.end()) throw Error(function->name + ": no label " + s.operands[0].name);
      i.number = label->second;
      i.run = [](Thread& t, const Instruction& in) {
        t.next = static_cast<int>(in.number);
        return Step::kJumped;
      };
    } else if (name == "call") {
      // call (result), function, (arguments): the areas that they were declared in.
      const bool has_result = s.operands.at(0).kind == Operand::Kind::kVector;
      i.callee = find(s.operands.at(has_result ? 1 : 0).name);
      if (i.callee == nullptr) throw Error(function->name + ": no function " + s.operands[has_result ? 1 : 0].name);
      i.number = has_result ? static_cast<std::int64_t>(s.operands[0].parts.size()) : 0;
      for (const Operand& o : s.operands) {
        for (const Operand& part : o.parts) i.list.push_back(part.slot);
      }
      i.run = [](Thread& t, const Instruction& in) {
        const Function& f = *in.callee->function;
        Frame frame{t.program, t.next + 1, t.r, {}, {}, {}};
        frame.slots.assign(static_cast<std::size_t>(f.slots), 0xffffffffffffffffull);
        frame.params.assign(f.param_bytes, 0xff);
        frame.calls.assign(f.call_bytes, 0xff);
        if (f.local_bytes > 0) t.fail("a called function with local memory");
        for (std::size_t n = 0; n < f.params.size(); ++n) {
          const auto from = t.r[in.list[static_cast<std::size_t>(in.number) + n]];
          std::memcpy(frame.params.data() + f.params[n].offset, reinterpret_cast<const void*>(from), f.params[n].bytes);
        }
        t.frames.push_back(std::move(frame));
        Frame& own = t.frames.back();
        t.program = in.callee;
        t.next = 0;
        t.r = own.slots.data();
        for (const auto& c : f.constants) t.r[c.slot] = c.value;
        for (const auto& special : f.specials) {
          const std::string& n = special.name;
          const auto offset = [&] { return std::stoull(n.substr(n.find(' ') + 1)); };
          if (n.starts_with("param ")) {
            t.r[special.slot] = reinterpret_cast<std::uint64_t>(own.params.data()) + offset();
          } else if (n.starts_with("call ")) {
            t.r[special.slot] = reinterpret_cast<std::uint64_t>(own.calls.data()) + offset();
          } else {
            t.fail("a called function that reads " + n);
          }
        }
        return Step::kJumped;
      };
    } else if (name == "ret" || name == "exit") {
      i.run = [](Thread& t, const Instruction&) {
        if (t.frames.empty()) return Step::kExited;
        const Frame frame = std::move(t.frames.back());
        t.frames.pop_back();
        const Function& f = *t.program->function;
        t.program = frame.program;
        t.next = frame.next;
        t.r = frame.r;
        const Instruction& call = t.program->code[static_cast<std::size_t>(t.next - 1)];
        for (std::size_t n = 0; n < f.returns.size(); ++n) {
          std::memcpy(reinterpret_cast<void*>(t.r[call.list[n]]), frame.params.data() + f.returns[n].offset,
                      f.returns[n].bytes);
        }
        return Step::kJumped;
      };
    } else if (!decode_arithmetic(s, i) && !decode_memory(s, i) && !decode_matrix(s, i) && !decode_barrier(s, i) &&
               !decode_bulk(s, i)) {
      throw Error(function->name + ", PTX line " + std::to_string(s.line) + ": the instruction " + s.text() +
                  " is unknown");
    }
    program.code.push_back(std::move(i));
  }
  return program;
}

}  // namespace violin::emulator
