-- Applies a change, and ends the lease that it names.   ARGV[4]: the lease; '': none ends.
-- A lease that has ended already was settled before, so nothing changes.

local minute, day = four(), number()
local day_used, month = four(), number()
local month_cost = number()

if ARGV[4] ~= '' then
  if redis.call('ZREM', KEYS[2], ARGV[4]) == 0 then return answer(0, account) end
  account.in_flight = account.in_flight - 1
end
for i = 1, 4 do
  if bounds.minute[i] ~= 0 then account.minute[i] = math.max(0, account.minute[i] + minute[i]) end
  if day == account.day then account.day_used[i] = math.max(0, account.day_used[i] + day_used[i]) end
end
if month == account.month then account.month_cost = math.max(0, account.month_cost + month_cost) end
save(account)
return answer(1, account)
