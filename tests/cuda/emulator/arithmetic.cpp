// Arithmetic of single threads.
#include <cfenv>
#include <limits>
#include <type_traits>

#include "machine.h"
#include "numbers.h"

namespace violin::emulator {
namespace {

using S16 = std::int16_t;
using S32 = std::int32_t;
using S64 = std::int64_t;
using U8 = std::uint8_t;
using U16 = std::uint16_t;
using U32 = std::uint32_t;
using U64 = std::uint64_t;
using Run = Step (*)(Thread&, const Instruction&);

struct Predicate {};  // slots of 0 or 1

template <class T>
T read(const Thread& t, int slot) {
  return t.get<T>(slot);
}

// kernel(T a, T b) -> result, as an instruction.
template <class T, auto kFunction>
Step unary(Thread& t, const Instruction& i) {
  t.set(i.slots[0], kFunction(t.get<T>(i.slots[1])));
  return Step::kNext;
}
template <class T, auto kFunction>
Step binary(Thread& t, const Instruction& i) {
  t.set(i.slots[0], kFunction(t.get<T>(i.slots[1]), t.get<T>(i.slots[2])));
  return Step::kNext;
}
template <class T, auto kFunction>
Step ternary(Thread& t, const Instruction& i) {
  t.set(i.slots[0], kFunction(t.get<T>(i.slots[1]), t.get<T>(i.slots[2]), t.get<T>(i.slots[3])));
  return Step::kNext;
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
T wrapped_add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a + b;
  else
    return static_cast<T>(static_cast<U64>(a) + static_cast<U64>(b));
}
template <class T>
T wrapped_sub(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a - b;
  else
    return static_cast<T>(static_cast<U64>(a) - static_cast<U64>(b));
}
template <class T>
T wrapped_mul(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a * b;
  else
    return static_cast<T>(static_cast<U64>(a) * static_cast<U64>(b));
}
template <class T>
T multiply_add(T a, T b, T c) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fma(a, b, c);
  else
    return static_cast<T>(static_cast<U64>(a) * static_cast<U64>(b) + static_cast<U64>(c));
}
template <class T>
T quotient(T a, T b) {
  if constexpr (!std::is_floating_point_v<T>) {
    if (b == 0) return static_cast<T>(-1);
    if constexpr (std::is_signed_v<T>) {
      if (b == -1) return wrapped_sub<T>(0, a);
    }
  }
  return static_cast<T>(a / b);
}
template <class T>
T remainder_of(T a, T b) {
  if (b == 0) return a;
  if constexpr (std::is_signed_v<T>) {
    if (b == -1) return 0;
  }
  return static_cast<T>(a % b);
}
template <class T>
T high_product(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> 64);
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, S64, U64>;
    return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
  }
}
template <class T>
auto wide_product(T a, T b) {
  using Signed = std::conditional_t<sizeof(T) == 2, S32, S64>;
  using Wide = std::conditional_t<std::is_signed_v<T>, Signed, std::make_unsigned_t<Signed>>;
  return static_cast<Wide>(static_cast<Wide>(a) * static_cast<Wide>(b));
}
// A number wins over what is none.
template <class T>
T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmin(a, b);
  else
    return a < b ? a : b;
}
template <class T>
T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fmax(a, b);
  else
    return a > b ? a : b;
}
template <class T>
T size_of(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return std::fabs(a);
  else
    return a < 0 ? wrapped_sub<T>(0, a) : a;
}
template <class T>
T negative(T a) {
  if constexpr (std::is_floating_point_v<T>)
    return -a;
  else
    return wrapped_sub<T>(0, a);
}
template <class T>
T both(T a, T b) {
  return a & b;
}
template <class T>
T either(T a, T b) {
  return a | b;
}
template <class T>
T exclusive(T a, T b) {
  return a ^ b;
}
template <class T>
T inverted(T a) {
  return static_cast<T>(~a);
}
template <class T>
T reciprocal(T a) {
  return T{1} / a;
}
template <class T>
T root(T a) {
  return std::sqrt(a);
}
float inverse_root(float a) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(a)));
}
float power_of_two(float a) {
  return static_cast<float>(std::exp2(static_cast<double>(a)));
}
float power_of_two_flushed(float a) {
  const float y = power_of_two(a);
  return y < std::numeric_limits<float>::min() ? 0.0f : y;
}
// The approximation of a reciprocal that division in double starts from: 20 bits of the result.
double reciprocal_flushed(double a) {
  return std::bit_cast<double>(std::bit_cast<U64>(1 / a) & 0xffffffff00000000ull);
}
__attribute__((noinline)) float fma_down(float a, float b, float c) {
  const int before = std::fegetround();
  std::fesetround(FE_DOWNWARD);
  volatile float x = a, y = b, z = c;
  volatile float sum = std::fma(x, y, z);
  std::fesetround(before);
  return sum;
}
float fma_rounding_down(float a, float b, float c) {
  return fma_down(a, b, c);
}

// Shifts beyond the width give 0, or the sign.
template <class T>
Step shift_left(Thread& t, const Instruction& i) {
  const U32 by = t.get<U32>(i.slots[2]);
  t.set(i.slots[0], by >= 8 * sizeof(T) ? T{0} : static_cast<T>(t.get<T>(i.slots[1]) << by));
  return Step::kNext;
}
template <class T>
Step shift_right(Thread& t, const Instruction& i) {
  const U32 by = t.get<U32>(i.slots[2]);
  const T x = t.get<T>(i.slots[1]);
  constexpr U32 kBits = 8 * sizeof(T);
  t.set(i.slots[0], by >= kBits ? static_cast<T>(x < 0 ? -1 : 0) : static_cast<T>(x >> by));
  return Step::kNext;
}

template <class T, auto kCompare>
Step compare(Thread& t, const Instruction& i) {
  t.r[i.slots[0]] = kCompare(t.get<T>(i.slots[1]), t.get<T>(i.slots[2])) ? 1 : 0;
  return Step::kNext;
}
template <class T>
bool eq(T a, T b) {
  return a == b;
}
template <class T>
bool ne(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a < b || a > b;
  else
    return a != b;
}
template <class T>
bool lt(T a, T b) {
  return a < b;
}
template <class T>
bool le(T a, T b) {
  return a <= b;
}
template <class T>
bool gt(T a, T b) {
  return a > b;
}
template <class T>
bool ge(T a, T b) {
  return a >= b;
}
// Also true where one is not a number.
template <class T>
bool equ(T a, T b) {
  return !(a < b || a > b);
}
template <class T>
bool neu(T a, T b) {
  return a != b;
}
template <class T>
bool ltu(T a, T b) {
  return !(a >= b);
}
template <class T>
bool leu(T a, T b) {
  return !(a > b);
}
template <class T>
bool gtu(T a, T b) {
  return !(a <= b);
}
template <class T>
bool geu(T a, T b) {
  return !(a < b);
}

template <class T>
Run comparison(const std::string& how) {
  if (how == "eq") return compare<T, eq<T>>;
  if (how == "ne") return compare<T, ne<T>>;
  if (how == "lt") return compare<T, lt<T>>;
  if (how == "le") return compare<T, le<T>>;
  if (how == "gt") return compare<T, gt<T>>;
  if (how == "ge") return compare<T, ge<T>>;
  if constexpr (std::is_floating_point_v<T>) {
    if (how == "equ") return compare<T, equ<T>>;
    if (how == "neu") return compare<T, neu<T>>;
    if (how == "ltu") return compare<T, ltu<T>>;
    if (how == "leu") return compare<T, leu<T>>;
    if (how == "gtu") return compare<T, gtu<T>>;
    if (how == "geu") return compare<T, geu<T>>;
  }
  return nullptr;
}

// function.template operator()<T>() for the type of that name.
template <class F>
Run for_type(const std::string& type, F function) {
  if (type == "s16") return function.template operator()<S16>();
  if (type == "u16" || type == "b16") return function.template operator()<U16>();
  if (type == "s32") return function.template operator()<S32>();
  if (type == "u32" || type == "b32") return function.template operator()<U32>();
  if (type == "s64") return function.template operator()<S64>();
  if (type == "u64" || type == "b64") return function.template operator()<U64>();
  if (type == "f32") return function.template operator()<float>();
  if (type == "f64") return function.template operator()<double>();
  return nullptr;
}

template <class To, class From>
Step convert(Thread& t, const Instruction& i) {
  t.set(i.slots[0], static_cast<To>(t.get<From>(i.slots[1])));
  return Step::kNext;
}
// Toward zero, and to the nearest end of the range.
template <class To, class From>
Step convert_to_integer(Thread& t, const Instruction& i) {
  const double x = static_cast<double>(t.get<From>(i.slots[1]));
  const double low = static_cast<double>(std::numeric_limits<To>::min());
  const double high = static_cast<double>(std::numeric_limits<To>::max());
  t.set(i.slots[0], std::isnan(x) ? To{0}
                    : x <= low    ? std::numeric_limits<To>::min()
                    : x >= high   ? std::numeric_limits<To>::max()
                                  : static_cast<To>(x));
  return Step::kNext;
}

template <class To>
Run conversion_to(const std::string& from) {
  if (from == "s8") return convert<To, std::int8_t>;
  if (from == "u8") return convert<To, U8>;
  if (from == "s16") return convert<To, S16>;
  if (from == "u16") return convert<To, U16>;
  if (from == "s32") return convert<To, S32>;
  if (from == "u32") return convert<To, U32>;
  if (from == "s64") return convert<To, S64>;
  if (from == "u64") return convert<To, U64>;
  if (from == "f32") {
    if constexpr (std::is_floating_point_v<To>)
      return convert<To, float>;
    else
      return convert_to_integer<To, float>;
  }
  if (from == "f64") {
    if constexpr (std::is_floating_point_v<To>)
      return convert<To, double>;
    else
      return convert_to_integer<To, double>;
  }
  return nullptr;
}

template <auto kPack>
Step pack_two(Thread& t, const Instruction& i) {  // the first operand goes to the upper half
  const U32 high = kPack(t.get<float>(i.slots[1]));
  const U32 low = kPack(t.get<float>(i.slots[2]));
  t.set(i.slots[0], high << 16 | low);
  return Step::kNext;
}
float saturated(float x) {
  return x > 0 ? std::fmin(x, 1.0f) : 0.0f;
}

Run conversion(const Statement& s) {
  const std::string& from = s.opcode.back();
  const std::string& to = s.opcode[s.opcode.size() - 2];
  if (to == "f32" && from == "f16") return unary<U16, from_float16>;
  if (to == "f32" && from == "bf16") return unary<U16, from_bfloat16>;
  if (to == "f16" && from == "f32") return unary<float, to_float16>;
  if (to == "bf16" && from == "f32") return unary<float, to_bfloat16>;
  if (to == "f16x2" && from == "f32") return pack_two<to_float16>;
  if (to == "bf16x2" && from == "f32") return pack_two<to_bfloat16>;
  if (s.has("sat")) return to == "f32" && from == "f32" ? unary<float, saturated> : nullptr;
  const bool rounds = s.has("rmi") || s.has("rpi") || s.has("rni") || s.has("rz") || s.has("rm") || s.has("rp");
  if (rounds) return nullptr;
  if (to == "s8") return conversion_to<std::int8_t>(from);
  if (to == "u8") return conversion_to<U8>(from);
  if (to == "s16") return conversion_to<S16>(from);
  if (to == "u16") return conversion_to<U16>(from);
  if (to == "s32") return conversion_to<S32>(from);
  if (to == "u32") return conversion_to<U32>(from);
  if (to == "s64") return conversion_to<S64>(from);
  if (to == "u64") return conversion_to<U64>(from);
  if (to == "f32") return conversion_to<float>(from);
  if (to == "f64") return conversion_to<double>(from);
  return nullptr;
}

Step move(Thread& t, const Instruction& i) {
  t.r[i.slots[0]] = t.r[i.slots[1]];
  return Step::kNext;
}
// number: bits of each part.
Step join(Thread& t, const Instruction& i) {
  U64 all = 0;
  for (std::size_t n = 0; n < i.list.size(); ++n) {
    all |= (t.r[i.list[n]] & ((U64{1} << i.number) - 1)) << (static_cast<U64>(i.number) * n);
  }
  t.r[i.slots[0]] = all;
  return Step::kNext;
}
Step split(Thread& t, const Instruction& i) {
  const U64 all = t.r[i.slots[1]];
  for (std::size_t n = 0; n < i.list.size(); ++n) {
    if (i.list[n] >= 0) t.r[i.list[n]] = all >> (static_cast<U64>(i.number) * n) & ((U64{1} << i.number) - 1);
  }
  return Step::kNext;
}

Step insert_bits(Thread& t, const Instruction& i) {  // bfi d, a, b, position, length
  const U32 position = t.get<U32>(i.slots[3]) & 255;
  const U32 length = t.get<U32>(i.slots[4]) & 255;
  const U64 mask = length >= 32 ? 0xffffffffull : (U64{1} << length) - 1;
  const U64 a = t.get<U32>(i.slots[1]) & mask;
  const U64 b = t.get<U32>(i.slots[2]);
  const U32 result = position >= 32 ? static_cast<U32>(b) : static_cast<U32>((b & ~(mask << position)) | a << position);
  t.set(i.slots[0], result);
  return Step::kNext;
}
Step permute_bytes(Thread& t, const Instruction& i) {
  const U64 both_words = U64{t.get<U32>(i.slots[2])} << 32 | t.get<U32>(i.slots[1]);
  const U32 selector = t.get<U32>(i.slots[3]);
  U32 result = 0;
  for (unsigned n = 0; n < 4; ++n) {
    const U32 choice = selector >> 4 * n & 15;
    U32 byte = static_cast<U32>(both_words >> 8 * (choice & 7)) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * n;
  }
  t.set(i.slots[0], result);
  return Step::kNext;
}

template <bool kNegated>
Step select(Thread& t, const Instruction& i) {
  t.r[i.slots[0]] = t.r[(t.r[i.slots[3]] != 0) != kNegated ? i.slots[1] : i.slots[2]];
  return Step::kNext;
}

// Predicates are slots of 0 and 1, so that bitwise operations do for them.
template <auto kFunction>
Step on_predicates(Thread& t, const Instruction& i) {
  t.r[i.slots[0]] = kFunction(t.r[i.slots[1]] != 0, t.r[i.slots[2]] != 0) ? 1 : 0;
  return Step::kNext;
}
bool and_of(bool a, bool b) {
  return a && b;
}
bool or_of(bool a, bool b) {
  return a || b;
}
bool xor_of(bool a, bool b) {
  return a != b;
}
Step not_of(Thread& t, const Instruction& i) {
  t.r[i.slots[0]] = t.r[i.slots[1]] == 0;
  return Step::kNext;
}

Run operation(const Statement& s) {
  const std::string& name = s.opcode[0];
  const std::string& type = s.opcode.back();
  if (type == "pred") {
    if (name == "and") return on_predicates<and_of>;
    if (name == "or") return on_predicates<or_of>;
    if (name == "xor") return on_predicates<xor_of>;
    if (name == "not") return not_of;
    return nullptr;
  }
  if (name == "ex2" && type == "f32")
    return s.has("ftz") ? unary<float, power_of_two_flushed> : unary<float, power_of_two>;
  if (name == "rsqrt" && type == "f32") return unary<float, inverse_root>;
  if (name == "rcp" && type == "f64" && s.has("approx")) return unary<double, reciprocal_flushed>;
  if (name == "fma" && s.has("rm")) return type == "f32" ? ternary<float, fma_rounding_down> : nullptr;
  if (s.has("rm") || s.has("rp") || s.has("rz") || s.has("sat") || s.has("cc")) return nullptr;
  return for_type(type, [&]<class T>() -> Run {
    if (name == "add") return binary<T, wrapped_add<T>>;
    if (name == "sub") return binary<T, wrapped_sub<T>>;
    if (name == "min") return binary<T, smaller<T>>;
    if (name == "max") return binary<T, larger<T>>;
    if (name == "abs") return unary<T, size_of<T>>;
    if (name == "neg") return unary<T, negative<T>>;
    if (name == "div") return binary<T, quotient<T>>;
    if constexpr (std::is_floating_point_v<T>) {
      if (name == "mul") return binary<T, wrapped_mul<T>>;
      if (name == "fma") return ternary<T, multiply_add<T>>;
      if (name == "rcp") return unary<T, reciprocal<T>>;
      if (name == "sqrt") return unary<T, root<T>>;
    } else {
      if (name == "mul" && s.has("lo")) return binary<T, wrapped_mul<T>>;
      if (name == "mul" && s.has("hi")) return binary<T, high_product<T>>;
      if (name == "mad" && s.has("lo")) return ternary<T, multiply_add<T>>;
      if constexpr (sizeof(T) < 8) {
        if (name == "mul" && s.has("wide")) return binary<T, wide_product<T>>;
      }
      if (name == "rem") return binary<T, remainder_of<T>>;
      if (name == "and") return binary<T, both<T>>;
      if (name == "or") return binary<T, either<T>>;
      if (name == "xor") return binary<T, exclusive<T>>;
      if (name == "not") return unary<T, inverted<T>>;
      if (name == "shl") return shift_left<T>;
      if (name == "shr") return shift_right<T>;
    }
    return nullptr;
  });
}

int bits_of(const std::string& type) {
  return std::stoi(type.substr(1));
}

bool decode_move(const Statement& s, Instruction& i) {
  const Operand& to = s.operands.at(0);
  const Operand& from = s.operands.at(1);
  if (to.kind == Operand::Kind::kVector || from.kind == Operand::Kind::kVector) {
    const auto& parts = to.kind == Operand::Kind::kVector ? to.parts : from.parts;
    for (const Operand& part : parts) i.list.push_back(part.slot);
    i.number = bits_of(s.opcode.back()) / static_cast<int>(parts.size());
    i.run = &to == &s.operands[0] && to.kind == Operand::Kind::kVector ? split : join;
  } else {
    i.run = move;
  }
  return true;
}

}  // namespace

bool decode_arithmetic(const Statement& s, Instruction& i) {
  const std::string& name = s.opcode[0];
  if (name == "ld" || name == "st" || name == "red" || name == "bar" || name == "shfl" || name == "cp") return false;
  for (std::size_t n = 0; n < s.operands.size() && n < i.slots.size(); ++n) i.slots[n] = s.operands[n].slot;
  if (name == "mov") return decode_move(s, i);
  if (name == "cvta") {
    if (s.has("shared")) return false;  // needs an address in the host's memory; nothing here asks for it
    i.run = move;
  } else if (name == "cvt") {
    i.run = conversion(s);
  } else if (name == "selp") {
    i.run = s.operands.at(3).negated ? select<true> : select<false>;
  } else if (name == "setp" && s.opcode.size() == 3) {
    const std::string& how = s.opcode[1];
    i.run = for_type(s.opcode.back(), [&]<class T>() { return comparison<T>(how); });
  } else if (name == "bfi" && s.opcode.back() == "b32") {
    i.run = insert_bits;
  } else if (name == "prmt" && s.opcode.size() == 2) {
    i.run = permute_bytes;
  } else {
    i.run = operation(s);
  }
  return i.run != nullptr;
}

}  // namespace violin::emulator
