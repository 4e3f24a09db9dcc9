// A fiber: a function with its own stack. On x86-64 a few instructions switch fibers, because the
// system's context switch makes two system calls. With AddressSanitizer, which follows only the
// system's switch, and on other processors <ucontext.h> is used.
#ifndef DEEPREDUCE_EMULATION_FIBER_H
#define DEEPREDUCE_EMULATION_FIBER_H

#include <cstddef>
#include <cstdint>
#include <memory>

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__)
#define DR_FAST_FIBERS 1
#else
#include <ucontext.h>
#endif

namespace deepreduce {
namespace emulation {

#ifdef DR_FAST_FIBERS
// Saves the callee-saved registers and the stack pointer to *from, and continues on the stack `to`.
extern "C" void dr_emulation_switch(void** from, void* to) __attribute__((visibility("hidden")));
__asm__(
    ".text\n"
    ".globl dr_emulation_switch\n"
    ".hidden dr_emulation_switch\n"
    ".type dr_emulation_switch, @function\n"
    "dr_emulation_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  popq %rdx\n  jmpq *%rdx\n"  // unlike ret, predicted well
    ".size dr_emulation_switch, .-dr_emulation_switch\n");
#endif

class Fiber {
 public:
  explicit Fiber(void (*main)()) : stack_(new uint8_t[kStack]) {
#ifdef DR_FAST_FIBERS
    // the stacks' ends at the same place of 64 KiB each would share a few lines of the cache
    static size_t made = 0;
    uint8_t* end = stack_.get() + kStack - made++ % kPlaces * kApart;
    uintptr_t top = reinterpret_cast<uintptr_t>(end) & ~uintptr_t{15};
    // six registers, the address to continue at, and a return address that is never used
    void** slots = reinterpret_cast<void**>(top) - 8;
    for (int i = 0; i < 8; ++i) slots[i] = nullptr;
    slots[6] = reinterpret_cast<void*>(main);
    inside_ = slots;
#else
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = kStack;
    inside_.uc_link = nullptr;
    makecontext(&inside_, main, 0);
#endif
  }
  // Switches from the scheduler to the fiber, and returns when the fiber switches back.
  void enter() { change(outside_, inside_); }
  void leave() { change(inside_, outside_); }

 private:
  std::unique_ptr<uint8_t[]> stack_;
#ifdef DR_FAST_FIBERS
  static constexpr size_t kPlaces = 64, kApart = 320, kStack = (64 + 20) * 1024;
  static void change(void*& from, void* to) { dr_emulation_switch(&from, to); }
  void* inside_ = nullptr;
  void* outside_ = nullptr;
#else
  static constexpr size_t kStack = 64 * 1024;
  static void change(ucontext_t& from, ucontext_t& to) { swapcontext(&from, &to); }
  ucontext_t inside_, outside_;
#endif
};

}  // namespace emulation
}  // namespace deepreduce
#endif
