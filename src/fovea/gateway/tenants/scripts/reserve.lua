-- Takes all amounts and a place in flight, or nothing.   ARGV[4]: the lease.

local amounts = four()

local function fits()
  for i = 1, 4 do
    local amount = amounts[i]
    if amount ~= 0 then
      local limit = bounds.minute[i]
      if limit ~= 0 and account.minute[i] + amount > limit + ROUNDING then return false end
      limit = bounds.day[i]
      if limit ~= 0 and account.day_used[i] + amount > limit + ROUNDING then return false end
    end
  end
  local limit, cost = bounds.month_cost, amounts[4]
  if limit ~= 0 and cost ~= 0 and account.month_cost + cost > limit + ROUNDING then return false end
  return bounds.in_flight == 0 or account.in_flight + 1 <= bounds.in_flight
end

if not fits() then return answer(0, account) end
for i = 1, 4 do
  if bounds.minute[i] ~= 0 then account.minute[i] = account.minute[i] + amounts[i] end
  account.day_used[i] = account.day_used[i] + amounts[i]
end
account.month_cost = account.month_cost + amounts[4]
hold(account, ARGV[4])
save(account)
return answer(1, account)
