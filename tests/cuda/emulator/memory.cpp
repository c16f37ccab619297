// Loads, stores, additions in memory, and small asynchronous copies.
#include "machine.h"

namespace violin::emulator {
namespace {

// list: registers; number: offset; other: bytes of one; slots[1]: the address.
template <bool kShared>
unsigned char* place(Thread& t, const Instruction& i, bool write) {
  const std::size_t bytes = static_cast<std::size_t>(i.other) * i.list.size();
  if constexpr (kShared) {
    return shared_bytes(t, t.get<std::uint32_t>(i.slots[1]) + static_cast<std::uint32_t>(i.number), bytes, write);
  } else {
    return global_bytes(t, t.r[i.slots[1]] + static_cast<std::uint64_t>(i.number), bytes, write);
  }
}

template <class T, bool kShared>
Step load(Thread& t, const Instruction& i) {
  const unsigned char* from = place<kShared>(t, i, false);
  for (std::size_t n = 0; n < i.list.size(); ++n) {
    if constexpr (kShared && std::is_same_v<T, std::uint32_t>) {
      t.load_shared(i.list[n], from + 4 * n, from + 4 * n + 2);
      continue;
    }
    T value;
    std::memcpy(&value, from + n * sizeof(T), sizeof(T));
    // Signed bytes and halves fill the register.
    if constexpr (std::is_integral_v<T> && std::is_signed_v<T>)
      t.set(i.list[n], static_cast<std::int64_t>(value));
    else
      t.set(i.list[n], value);
  }
  return Step::kNext;
}

template <class T, bool kShared>
Step store(Thread& t, const Instruction& i) {
  unsigned char* to = place<kShared>(t, i, true);
  for (std::size_t n = 0; n < i.list.size(); ++n) {
    const T value = t.get<T>(i.list[n]);
    std::memcpy(to + n * sizeof(T), &value, sizeof(T));
  }
  return Step::kNext;
}

Step add_floats(Thread& t, const Instruction& i) {
  unsigned char* to = place<false>(t, i, true);
  for (std::size_t n = 0; n < i.list.size(); ++n) {
    float sum;
    std::memcpy(&sum, to + 4 * n, 4);
    sum += t.get<float>(i.list[n]);
    std::memcpy(to + 4 * n, &sum, 4);
  }
  return Step::kNext;
}

template <class T>
void choose(Instruction& i, bool is_load, bool shared) {
  i.other = sizeof(T);
  if (is_load) {
    i.run = shared ? load<T, true> : load<T, false>;
  } else {
    i.run = shared ? store<T, true> : store<T, false>;
  }
}

bool decode_access(const Statement& s, Instruction& i) {
  const bool is_load = s.opcode[0] == "ld";
  const Operand& address = s.operands.at(is_load ? 1 : 0);
  const Operand& value = s.operands.at(is_load ? 0 : 1);
  i.slots[1] = address.slot;
  i.number = address.offset;
  if (value.kind == Operand::Kind::kVector) {
    for (const Operand& part : value.parts) i.list.push_back(part.slot);
  } else {
    i.list.push_back(value.slot);
  }
  // Parameters and local memory are bytes of the host, as global memory is.
  const bool shared = s.has("shared") || s.has("shared::cta");
  const std::string& type = s.opcode.back();
  if (s.opcode[0] == "red") {
    if (!s.has("global") || !s.has("add") || type != "f32") return false;
    i.other = 4;
    i.run = add_floats;
    return true;
  }
  if (type == "u8" || type == "b8")
    choose<std::uint8_t>(i, is_load, shared);
  else if (type == "s8")
    choose<std::int8_t>(i, is_load, shared);
  else if (type == "u16" || type == "b16")
    choose<std::uint16_t>(i, is_load, shared);
  else if (type == "s16")
    choose<std::int16_t>(i, is_load, shared);
  else if (type == "u32" || type == "b32" || type == "f32")
    choose<std::uint32_t>(i, is_load, shared);
  else if (type == "s32")
    choose<std::int32_t>(i, is_load, shared);
  else if (type == "u64" || type == "b64" || type == "f64" || type == "s64")
    choose<std::uint64_t>(i, is_load, shared);
  else
    return false;
  return true;
}

void land(Thread& t, const AsyncCopy& copy) {
  unsigned char* to = shared_bytes(t, copy.to, static_cast<std::size_t>(copy.bytes), true);
  std::memset(to, 0, static_cast<std::size_t>(copy.bytes));
  if (copy.present == 0) return;
  // Whole or nothing, as the kernels here ask for it, or the first few bytes.
  for (int n = 0; n < copy.present; ++n) {
    to[n] = *global_bytes(t, copy.from + static_cast<std::uint64_t>(n), 1, false);
  }
}

// cp.async lands at once, or where the order is random when it is awaited: who lets it overwrite what others still read
// is found out by the one, who reads too early by the other.
Step copy(Thread& t, const Instruction& i) {
  const int bytes = t.get<std::int32_t>(i.slots[3]);
  const int present = i.slots[2] < 0 ? bytes : static_cast<int>(t.get<std::uint32_t>(i.slots[2]));
  const std::uint64_t from = t.r[i.slots[1]];
  if (from % static_cast<std::uint64_t>(bytes) != 0) t.fail("a copy from an address that is not aligned");
  if (present > bytes) t.fail("a copy of more than there is room for");
  const AsyncCopy copy{t.get<std::uint32_t>(i.slots[0]), from, bytes, present};
  if (t.block->cluster->in_order()) {
    land(t, copy);
  } else {
    t.copies.push_back(copy);
  }
  return Step::kNext;
}
Step commit(Thread& t, const Instruction&) {
  t.copy_groups.push_back(std::move(t.copies));
  t.copies.clear();
  return Step::kNext;
}
void await(Thread& t, std::size_t left) {
  while (t.copy_groups.size() > left) {
    for (const AsyncCopy& c : t.copy_groups.front()) land(t, c);
    t.copy_groups.pop_front();
  }
}
Step await_groups(Thread& t, const Instruction& i) {
  await(t, t.get<std::uint32_t>(i.slots[0]));
  return Step::kNext;
}
Step await_all(Thread& t, const Instruction& i) {
  commit(t, i);
  await(t, 0);
  return Step::kNext;
}

}  // namespace

bool decode_memory(const Statement& s, Instruction& i) {
  const std::string& name = s.opcode[0];
  if (name == "ld" || name == "st" || name == "red") return decode_access(s, i);
  if (name != "cp" || !s.has("async") || s.has("bulk")) return false;
  if (s.has("commit_group")) {
    i.run = commit;
  } else if (s.has("wait_all")) {
    i.run = await_all;
  } else if (s.has("wait_group")) {
    i.slots[0] = s.operands.at(0).slot;
    i.run = await_groups;
  } else if ((s.has("ca") || s.has("cg")) && s.operands.at(0).offset == 0 && s.operands.at(1).offset == 0) {
    // [to], [from], bytes, bytes that are read
    i.slots = {s.operands[0].slot, s.operands[1].slot, s.operands.size() > 3 ? s.operands[3].slot : -1,
               s.operands.at(2).slot};
    i.run = copy;
  } else {
    return false;
  }
  return true;
}

}  // namespace violin::emulator
