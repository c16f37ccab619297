// Threads, warps, blocks and clusters that execute a decoded function. One host thread runs all of them in turns: a
// thread goes on until it has to wait for others, so that whatever waits for what is known, and a deadlock is seen.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <unordered_map>

#include "ptx.h"

namespace violin::emulator {

struct Thread;
struct Warp;
struct Block;
class Cluster;
struct Instruction;

enum class Step {
  kNext,
  kYield,    // the next one, after others have had their turn
  kJumped,   // the next instruction is set
  kWaiting,  // whoever wakes the thread up sets it
  kExited,
};

struct Program;

struct Instruction {
  Step (*run)(Thread&, const Instruction&) = nullptr;
  // What the lanes of a warp do together once all have arrived (Warp::meet).
  void (*together)(Warp&, std::uint32_t lanes, const Instruction&) = nullptr;
  int guard = -1;
  bool guard_negated = false;
  bool negated = false;           // of a predicate operand
  std::array<int, 5> slots = {};  // by convention the result first
  std::int64_t number = 0;        // an offset, a count, a target
  std::int64_t other = 0;
  std::vector<int> list;      // vectors
  std::vector<int> touches;   // all slots that are read or written
  bool awaits_loads = false;  // is not done before the thread's loads from shared memory
  bool is_move = false, is_product = false;
  const Program* callee = nullptr;
  const Statement* statement = nullptr;
};

struct Program {
  std::shared_ptr<const Function> function;
  std::vector<Instruction> code;
  bool reads_async = false;  // shared memory, through the async proxy: then writes need fences for it
};

// Decoders, by what instructions do. Each returns false where an instruction is not its own.
bool decode_arithmetic(const Statement& s, Instruction& i);
bool decode_memory(const Statement& s, Instruction& i);
bool decode_matrix(const Statement& s, Instruction& i);
bool decode_barrier(const Statement& s, Instruction& i);
bool decode_bulk(const Statement& s, Instruction& i);
// Makes i a meeting of the lanes in a mask: slot of the mask, or -1 for all that have not exited.
void make_meeting(Instruction& i, void (*together)(Warp&, std::uint32_t, const Instruction&), int mask_slot);

// What kernels may touch of the host's memory.
class Memory {
 public:
  void allow(std::uint64_t begin, std::size_t bytes);
  void forget();
  bool allows(std::uint64_t address, std::size_t bytes) const;

 private:
  std::map<std::uint64_t, std::uint64_t> ranges_;  // begin, end
  mutable std::uint64_t begin_ = 1, end_ = 0;      // of the last hit
};

// A barrier in shared memory.
struct SharedBarrier {
  std::int64_t count = 0, pending = 0, bytes = 0;
  int phase = 0;
  int maker = -1;                // the thread that has made it, before its fence
  std::vector<Thread*> waiters;  // ask again when the phase has ended
};

// A barrier of the hardware, for all or some threads of a block.
struct NamedBarrier {
  int arrived = 0, expected = 0;
  bool all = true, any = false;
  struct Waiter {
    Thread* thread;
    int result = -1;  // slot of the predicate that a reduction gives
    bool wants_all = false;
  };
  std::vector<Waiter> waiters;
};

// A product whose operands in shared memory must not change before it is awaited.
struct PendingProduct {
  const Instruction* instruction;
  struct Piece {
    std::uint32_t address;
    std::array<unsigned char, 16> bytes;
  };
  std::vector<Piece> pieces;
};

struct Warp {
  Block* block = nullptr;
  std::array<Thread*, 32> lanes{};
  std::uint32_t alive = 0;
  struct Meeting {
    const Instruction* at;
    std::uint32_t expected, arrived;
  };
  std::vector<Meeting> meetings;
  bool fenced = false;                             // for products, since the last wait for some
  std::uint32_t committed = 0;                     // groups of products so far
  std::vector<PendingProduct> open;                // products since the last commit
  std::deque<std::vector<PendingProduct>> groups;  // committed, oldest first

  Step meet(Thread& t, const Instruction& i, std::uint32_t mask);
  void hold(std::size_t meeting);
};

// A load from shared memory that has been issued and not used yet. Loads keep their place in a block's own queue of
// accesses, but an arrival at a barrier of another block may overtake them: what that lets somebody write, they then
// read.
struct FlyingLoad {
  int slot;
  const unsigned char* low;   // of a number of 4 bytes, or of two halves
  const unsigned char* high;  // of the upper half
};

struct AsyncCopy {  // cp.async: 4 to 16 bytes, the rest zero
  std::uint32_t to;
  std::uint64_t from;
  int bytes, present;
};

struct Frame {
  const Program* program;
  int next;
  std::uint64_t* r;
  std::vector<std::uint64_t> slots;
  std::vector<unsigned char> params, calls;
};

struct Thread {
  std::uint64_t* r = nullptr;  // slots
  const Program* program = nullptr;
  int next = 0;  // instruction
  Warp* warp = nullptr;
  Block* block = nullptr;
  int id = 0, lane = 0;
  bool exited = false;
  const Instruction* waits_at = nullptr;
  bool in_cluster_barrier = false;
  std::vector<std::uint64_t> slots;
  std::vector<unsigned char> local, calls;
  std::vector<Frame> frames;  // of callers
  std::vector<FlyingLoad> flying;
  std::vector<AsyncCopy> copies;
  std::deque<std::vector<AsyncCopy>> copy_groups;
  // Bulk stores: how many of the thread's groups have still to be read, and those of the open group.
  int open_stores = 0, unread_stores = 0;
  int waits_for_stores = -1;                                      // wakes up when no more than these are unread
  std::vector<std::pair<std::uint32_t, std::uint32_t>> unfenced;  // shared bytes written since the last such fence

  template <class T>
  T get(int slot) const {
    T value;
    std::memcpy(&value, r + slot, sizeof(T));
    return value;
  }
  template <class T>
  void set(int slot, T value) {
    r[slot] = 0;
    std::memcpy(r + slot, &value, sizeof(T));
  }
  // Per slot the group of products that it is a result of, counted from 1; and the newest of them.
  std::vector<std::uint32_t> result_of;
  std::uint32_t newest_result = 0;
  // Nobody but products may touch results before they are awaited.
  void check_results(const Instruction& i);
  // Loads 4 bytes from shared memory, or two halves: now, or where the order is random as late as may be.
  void load_shared(int slot, const unsigned char* low, const unsigned char* high);
  // What has to be there before an instruction.
  void land_loads(const Instruction& i);
  void land(const FlyingLoad& load);
  [[noreturn]] void fail(const std::string& what) const;
};

constexpr unsigned char kWritten = 1, kBarrier = 2;

struct Block {
  Cluster* cluster = nullptr;
  int rank = 0;  // in the cluster
  int alive = 0;
  std::array<unsigned, 3> index{};
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;
  std::vector<unsigned char> written;   // per byte: kWritten or kBarrier
  std::vector<std::uint16_t> unfenced;  // per byte: 1 + thread that wrote it without a fence since
  int loads_on_their_way = 0;           // bulk copies to this block
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<std::uint32_t, SharedBarrier> shared_barriers;

  SharedBarrier& barrier_at(const Thread& t, std::uint32_t offset);
  void settle(SharedBarrier& b);  // ends the phase where nothing is missing
  void settle(NamedBarrier& b);
};

struct Size3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Launch {
  const Program* program = nullptr;
  Size3 grid, block;
  std::size_t dynamic_shared = 0;
  std::vector<unsigned char> params;
  const Memory* memory = nullptr;
};

// In which order threads run and copies land. 0: threads in turns, copies at once. Others: seeds of a random order, in
// which copies land late and loads from shared memory come when they are used. Clusters run one after the other.
struct Order {
  std::uint64_t seed = 0;
};

class Cluster {
 public:
  Cluster(const Launch& launch, std::array<unsigned, 3> first_block, std::mt19937_64& random, bool in_order);
  void run();

  void wake(Thread& t) { ready_.push_back(&t); }
  bool in_order() const { return in_order_; }
  // Others may go on at once, also before the thread has the numbers that it has asked for.
  Step after_arrival() const { return in_order_ ? Step::kNext : Step::kYield; }
  // Runs now, or later where the order is random: work of the copy engine.
  void later(std::function<void()> work);
  Block& block(int rank) { return blocks_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(blocks_.size()); }
  const Launch& launch() const { return launch_; }
  void arrive_at_cluster_barrier(Thread& t);
  bool wait_at_cluster_barrier(Thread& t);
  void settle_cluster_barrier();

  // Addresses of shared memory: those of other blocks have the block's rank + 1 in their highest byte.
  static std::uint32_t in_block(std::uint32_t address, int rank) {
    return (address & 0xffffff) | static_cast<std::uint32_t>(rank + 1) << 24;
  }
  Block& block_of(Thread& t, std::uint32_t address) {
    const std::size_t rank = address >> 24;
    if (rank > blocks_.size()) t.fail("a shared address in a block that the cluster has not");
    return rank ? blocks_[rank - 1] : *t.block;
  }

 private:
  void run_thread(Thread& t);
  void exit(Thread& t);
  [[noreturn]] void report_deadlock() const;

  const Launch& launch_;
  std::vector<Block> blocks_;
  // Whom a random order holds back until all others wait: where everybody's chances are equal nobody falls far behind.
  enum class Slow { kWarp, kAllButAWarp, kWarpgroup, kLane, kBlock, kNobody };
  bool is_slow(const Thread& t) const;
  void choose_slow();
  Slow slow_ = Slow::kNobody;
  int slow_which_ = 0;
  std::deque<Thread*> held_;
  std::deque<Thread*> ready_;
  std::deque<std::function<void()>> work_;
  std::mt19937_64& random_;
  bool in_order_;
  int cluster_arrived_ = 0, cluster_phase_ = 0;
  std::vector<Thread*> cluster_waiters_;
  std::unordered_map<const Thread*, int> cluster_phase_of_;
};

// Access to memory with checks; bytes is at most 16.
unsigned char* global_bytes(const Thread& t, std::uint64_t address, std::size_t bytes, bool write);
unsigned char* shared_bytes(Thread& t, std::uint32_t address, std::size_t bytes, bool write);
// The same for what the async proxy reads, of any length: wgmma and bulk stores.
const unsigned char* shared_for_async(const Thread& t, Block& block, std::uint32_t offset, std::size_t bytes);

Program decode(const std::shared_ptr<const Function>& function,
               const std::function<const Program*(const std::string&)>& find);
void run(const Launch& launch, const Order& order);

}  // namespace violin::emulator
